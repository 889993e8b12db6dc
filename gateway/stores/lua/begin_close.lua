-- Begin to close an opening or open session; it keeps its slot until it is released.
-- ARGV: session id, reason, time in which it should be released (s), the lease that it must have ('': any)
-- Returns the session, or nil if there is none in those states.

local has = redis.call('HMGET', key('session', ARGV[1]), 'state', 'lease')
if has[1] ~= 'opening' and has[1] ~= 'open' then
  return false
end
if ARGV[4] ~= '' and ARGV[4] ~= has[2] then
  return false
end
begin_close(ARGV[1], ARGV[2], ARGV[3])
return redis.call('HGETALL', key('session', ARGV[1]))

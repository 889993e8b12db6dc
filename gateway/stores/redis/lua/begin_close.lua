-- Start to close an opening or open session. It keeps its slot until it is released.
-- ARGV: session id, reason, time within which it should be released (s), the lease that it must have ('': any)
-- Returns the session, or nil if it is not opening or open (an error if it is unknown while the store is rebuilt).

local has = redis.call('HMGET', key('session', ARGV[1]), 'state', 'lease')
local is_meant = ARGV[4] == '' or ARGV[4] == has[2]
if not (has[1] and is_meant) and not is_whole() then
  return REBUILDING
end
if not is_meant or (has[1] ~= 'opening' and has[1] ~= 'open') then
  return false
end
return begin_close(ARGV[1], ARGV[2], ARGV[3])

-- Renew idle deadlines; none moves backwards.
-- ARGV: session id and seconds since its last activity, of each
-- Returns the ids of those that are not open. While the store is rebuilt nobody can say so of any: those that are open
-- are renewed, and the answer is an error if others were asked for.

local gone = {}
for i = 1, #ARGV, 2 do
  local session = redis.call('HMGET', key('session', ARGV[i]), 'state', 'idle_s')
  if session[1] == 'open' then
    local left_s = tonumber(session[2]) - math.max(0, tonumber(ARGV[i + 1]))
    redis.call('ZADD', key('deadlines'), 'GT', after(left_s), ARGV[i])
  else
    gone[#gone + 1] = ARGV[i]
  end
end
if #gone > 0 and not is_whole() then
  return REBUILDING
end
return gone

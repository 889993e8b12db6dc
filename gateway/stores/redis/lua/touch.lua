-- Renew idle deadlines. A deadline never moves backwards.
-- ARGV: id, and seconds since the last activity, of each session
-- Returns the ids of the sessions that are not open. While the store is rebuilt, open sessions are renewed, and any
-- other session gives an error, because its data may be lost.

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

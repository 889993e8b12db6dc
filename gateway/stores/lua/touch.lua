-- Renew idle deadlines; none moves backwards.
-- ARGV: session id and seconds since its last activity, of each
-- Returns the ids of those that are not open.

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
return gone

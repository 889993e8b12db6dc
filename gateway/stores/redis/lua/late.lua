-- List open sessions whose deadline has passed, earliest first; changes nothing.
-- ARGV: how many
-- Returns the sessions.

if not is_whole() then
  return {}
end
local limit = tonumber(ARGV[1])
local sessions = {}
local seen = 0
while true do
  local ids = redis.call('ZRANGEBYSCORE', key('deadlines'), '-inf', whole(now), 'LIMIT', seen, limit)
  for _, id in ipairs(ids) do
    if redis.call('HGET', key('session', id), 'state') == 'open' then
      sessions[#sessions + 1] = redis.call('HGETALL', key('session', id))
    end
    if #sessions >= limit then
      return sessions
    end
  end
  seen = seen + #ids
  if #ids < limit or limit <= 0 then
    return sessions
  end
end

-- Begin to close opening sessions whose deadline has passed, and again closing ones that nobody released; open ones are
-- expire.lua's.
-- ARGV: how many, time in which each should be released (s)
-- Returns the sessions, earliest deadline first.

if not is_whole() then
  return {}
end
local limit = tonumber(ARGV[1])
local sessions = {}
-- A page at a time, and forward: what is begun to close here moves behind the present, and out of the range.
local seen = 0
while #sessions < limit do
  local ids = redis.call('ZRANGEBYSCORE', key('deadlines'), '-inf', whole(now), 'LIMIT', seen, limit)
  if #ids == 0 then
    break
  end
  for _, id in ipairs(ids) do
    local session = redis.call('HMGET', key('session', id), 'state', 'reason')
    if not session[1] then
      -- Somebody else deleted the session's key; its deadline must not come up for ever.
      redis.call('ZREM', key('deadlines'), id)
    elseif session[1] == 'open' or #sessions >= limit then
      seen = seen + 1
    else
      sessions[#sessions + 1] = begin_close(id, session[2] or 'open_failed', ARGV[2])
    end
  end
end
return sessions

-- Start to close opening sessions whose deadline has passed, and repeat this for closing sessions that were not
-- released. expire.lua handles open sessions.
-- ARGV: maximum number of sessions, time within which each should be released (s)
-- Returns the sessions, earliest deadline first.

local sessions = {}
for i, id in ipairs(passed(tonumber(ARGV[1]), false)) do
  local reason = redis.call('HGET', key('session', id), 'reason') or 'open_failed'
  sessions[i] = begin_close(id, reason, ARGV[2])
end
return sessions

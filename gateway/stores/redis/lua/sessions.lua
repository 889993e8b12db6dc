-- List sessions that hold a slot, earliest deadline first.
-- ARGV: how many
-- Returns the sessions.

local sessions = {}
for _, id in ipairs(redis.call('ZRANGE', key('deadlines'), 0, tonumber(ARGV[1]) - 1)) do
  sessions[#sessions + 1] = redis.call('HGETALL', key('session', id))
end
return sessions

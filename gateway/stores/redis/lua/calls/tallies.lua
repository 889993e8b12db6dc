-- Return the counts that replicas reported of a session.
-- ARGV: session, lease
-- Returns for each replica with a report: {replica, 1 if it was reported in this run of the server else 0, time since
-- its last call ended (ms; '-' for none), its count}.

local this_run = run()
local found = {}
local rows = redis.call('HGETALL', key('call_tallies', ARGV[1] .. ':' .. ARGV[2]))
for i = 1, #rows, 2 do
  local told_in, ended, count = string.match(rows[i + 1], '^(%S+) (%S+) (.*)$')
  local age = ended == '-' and '-' or whole(now - tonumber(ended))
  found[#found + 1] = {rows[i], told_in == this_run and '1' or '0', age, count}
end
return found

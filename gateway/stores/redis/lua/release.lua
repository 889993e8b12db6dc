-- End a closing session, and grant its slot to the next waiting opening.
-- ARGV: session id, lease, time for which a closed session is kept (s)
-- Returns 1, or 0 if the session is unknown, of another lease or not closing.

local session = redis.call('HMGET', key('session', ARGV[1]), 'lease', 'state', 'reason', 'worker', 'environment')
if session[1] ~= ARGV[2] or session[2] ~= 'closing' then
  return 0
end
local owner = forget(ARGV[1], session[1], session[3], ARGV[3])
free(session[4], session[5], ARGV[1], owner)
return 1

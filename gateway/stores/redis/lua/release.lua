-- End a closing session and hand its slot to the next that waits.
-- ARGV: session id, lease, time a closed session is remembered (s)
-- Returns 1, or 0 if it is unknown, of another lease or not closing.

local session = redis.call('HMGET', key('session', ARGV[1]), 'lease', 'state', 'reason', 'worker', 'environment')
if session[1] ~= ARGV[2] or session[2] ~= 'closing' then
  return 0
end
forget(ARGV[1], session[1], session[3], ARGV[3])
free(session[4], session[5], ARGV[1])
return 1

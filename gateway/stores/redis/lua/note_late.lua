-- Note how many steps an open session had before a call that took too long.
-- ARGV: session id, lease, number of steps
-- Returns 1, or 0 if the session is unknown, of another lease or not open.

local session = redis.call('HMGET', key('session', ARGV[1]), 'lease', 'state')
if session[1] ~= ARGV[2] or session[2] ~= 'open' then
  return 0
end
redis.call('HSET', key('session', ARGV[1]), 'steps_before_late', ARGV[3])
return 1

-- Set a value of an open session.
-- ARGV: session id, lease, name, value
-- Returns 1, or 0 if the session is unknown, of another lease or not open.

local session = redis.call('HMGET', key('session', ARGV[1]), 'lease', 'state')
if session[1] ~= ARGV[2] or session[2] ~= 'open' then
  return 0
end
redis.call('HSET', key('session', ARGV[1]), ARGV[3], ARGV[4])
return 1

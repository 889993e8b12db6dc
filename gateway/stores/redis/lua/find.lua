-- Find a session.
-- ARGV: session id
-- Returns the session, or an empty list if it is unknown. While the store is rebuilt, a session without a slot gives an
-- error: a closed session may be of an older state, and an earlier session of the same id.

local session = redis.call('HGETALL', key('session', ARGV[1]))
if redis.call('HGET', key('session', ARGV[1]), 'worker') or is_whole() then
  return session
end
return REBUILDING

-- Find a session.
-- ARGV: session id
-- Returns the session, or an empty list if there is none. While the store is rebuilt: an error, unless it holds a slot. That
-- it was closed may be of an older state, and said of an earlier session of its id.

local session = redis.call('HGETALL', key('session', ARGV[1]))
if redis.call('HGET', key('session', ARGV[1]), 'worker') or is_whole() then
  return session
end
return REBUILDING

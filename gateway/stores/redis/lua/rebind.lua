-- Replace the handle of an open session, if it still has the expected handle.
-- ARGV: session id, lease, the expected handle, the new handle
-- Returns 1, or 0 if the session is unknown, of another lease, not open, or has another handle.

local session = redis.call('HMGET', key('session', ARGV[1]), 'lease', 'state', 'handle')
if session[1] ~= ARGV[2] and not is_whole() then
  return REBUILDING
end
if session[1] ~= ARGV[2] or session[2] ~= 'open' or (session[3] or '') ~= ARGV[3] then
  return 0
end
redis.call('HSET', key('session', ARGV[1]), 'handle', ARGV[4])
return 1

-- Record that a replica runs a call of a key, unless the key is known.
-- ARGV: session, lease, the key's hash, digest, task id, replica, how long its sign is there (s), how long the call is
--   known as running (s), the most calls of a session, the most bytes of a session
-- Returns {} if it is recorded; else {digest, {task id, state, replica, 1 if that lives else 0, outcome}}. While the
-- store is rebuilt: an error, unless the key is known, since it may have been lost.

local place, hashed, digest, task, replica = ARGV[1] .. ':' .. ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
sweep()
tidy(place, tonumber(ARGV[9]), tonumber(ARGV[10]))
local known = redis.call('HGET', key('calls', place), 'key:' .. hashed)
local head = known and head_of(place, known)
if head then
  return {head.digest, told(place, known, head)}
end
if not is_whole() then
  return REBUILDING
end
sign(replica, ARGV[7])
set_head(place, task, {state = 'running', digest = digest, hashed = hashed, replica = replica})
keep(place, task, ARGV[8])
return {}

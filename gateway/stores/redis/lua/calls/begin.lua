-- Record that a replica runs a call with a key, unless the key is known.
-- ARGV: session, lease, the key's hash, digest, task id, replica, lifetime of the replica's sign (s), time for which
--   the call counts as running (s), maximum number of calls of a session, maximum bytes of a session
-- Returns {} if the call is recorded; else {digest, {task id, state, replica, 1 if that lives else 0, outcome}}. While
-- the store is rebuilt, an unknown key gives an error, because its call may be lost data.

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

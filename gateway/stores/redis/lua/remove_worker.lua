-- Remove a worker with its slots, and end its sessions.
-- ARGV: worker id, reason, time for which a closed session is kept (s), the caller's fence
-- Returns the closed sessions; nil if the worker is unknown.

if fenced() then
  return NOT_LEADING
end
local worker = redis.call('HMGET', key('worker', ARGV[1]), 'environment', 'rank')
if not worker[1] then
  return false
end
local sessions, owners = {}, {}
for _, id in ipairs(redis.call('SMEMBERS', key('held', ARGV[1]))) do
  local session = redis.call('HMGET', key('session', id), 'lease', 'reason')
  -- A closing session keeps its reason: a session that its trainer deleted is "not found".
  local reason = session[2] or ARGV[2]
  redis.call('HSET', key('session', id), 'state', 'closed', 'reason', reason)
  sessions[#sessions + 1] = redis.call('HGETALL', key('session', id))
  local owner = forget(id, session[1], reason, ARGV[3])
  if owner then
    owners[owner] = true
  end
  publish_ended(id, session[1])
end
redis.call('DEL', key('held', ARGV[1]), key('worker', ARGV[1]))
redis.call('ZREM', key('free', worker[1]), worker[2])
redis.call('ZREM', key('workers'), ARGV[1])
serve_owners(owners)
if redis.call('EXISTS', key('queue', worker[1])) == 1 then
  publish_wanted(worker[1])
end
return sessions

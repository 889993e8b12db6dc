-- Undo a claim whose caller is gone: release its place in the queue, or its slot.
-- ARGV: session id, environment, owner, lease
-- Returns 1 if a place or a slot was released, else 0.

local id, environment, owner, lease = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
redis.call('DEL', key('failed', lease))
if redis.call('HGET', key('ticket', id), 'lease') == lease then
  leave(environment, id, owner)
  serve(environment) -- slots may have been kept for its group
  return 1
end
local session = redis.call('HMGET', key('session', id), 'lease', 'state', 'worker')
if session[1] ~= lease or session[2] ~= 'opening' then
  return 0
end
free(session[3], environment, id, forget(id, lease, false, '0'))
return 1

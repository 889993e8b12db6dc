-- Tell how an opening that waited stands.
-- ARGV: session id, environment, lease, '1' to leave the queue if it still waits
-- Returns {'granted', session}, {'waiting'}, {'left'}, {'failed', message}, {'lost', reason} (granted and ended since)
-- or {'unknown'} (its time passed, or the store was emptied).

local id, environment, lease = ARGV[1], ARGV[2], ARGV[3]
if redis.call('HGET', key('ticket', id), 'lease') == lease then
  if ARGV[4] ~= '1' then
    return {'waiting'}
  end
  leave(environment, id)
  return {'left'}
end
local session = redis.call('HMGET', key('session', id), 'lease', 'state', 'reason')
if session[1] == lease then
  if session[2] == 'opening' then
    return {'granted', redis.call('HGETALL', key('session', id))}
  end
  return {'lost', session[3] or session[2]}
end
local message = redis.call('GET', key('failed', lease))
if message then
  redis.call('DEL', key('failed', lease))
  return {'failed', message}
end
return {'unknown'}

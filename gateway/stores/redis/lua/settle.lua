-- Return the state of an opening that waited.
-- ARGV: session id, environment, owner, lease, '1' to leave the queue if it still waits
-- Returns {'granted', session}, {'waiting'}, {'failed', retry delay (ms), message}, or, each with the place that it had
-- or would have, the pace (ms) and the sessions that its owner holds, in all and in the environment: {'left'} (also if its
-- time has passed), {'lost'} (granted and ended since) or {'unknown'} (the store was emptied).

local id, environment, owner, lease = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if redis.call('HGET', key('ticket', id), 'lease') == lease then
  if ARGV[5] ~= '1' then
    return {'waiting'}
  end
  local place, pace_ms, held, held_here = outlook(environment, owner, id)
  leave(environment, id, owner)
  serve(environment) -- slots may have been kept for its group
  return {'left', place, pace_ms, held, held_here}
end
local session = redis.call('HMGET', key('session', id), 'lease', 'state')
if session[1] == lease then
  if session[2] == 'opening' then
    return {'granted', redis.call('HGETALL', key('session', id))}
  end
  return {'lost', outlook(environment, owner, false)}
end
local failed = redis.call('GET', key('failed', lease))
if failed then
  redis.call('DEL', key('failed', lease))
  if failed == 'late' then
    return {'left', outlook(environment, owner, false)}
  end
  local number, left_ms = string.match(failed, '^(%d+) (%d+)$')
  return {'failed', tonumber(left_ms), redis.call('GET', key('cause', number)) or ''}
end
return {'unknown', outlook(environment, owner, false)}

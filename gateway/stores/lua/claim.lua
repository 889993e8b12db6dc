-- Take a slot for an opening, or a place in the queue for one.
-- ARGV: the fields OPENING (idle_s and setup_s in seconds), how long its ticket counts (s; 0: it does not wait), how
-- many may wait
-- Returns {'granted', session}, {'waiting'}, {'exists'} or {'full', how many wait}.

local opening = {}
for i = 1, #OPENING do
  opening[i] = ARGV[i]
end
local kept_s, queue_max = ARGV[#OPENING + 1], tonumber(ARGV[#OPENING + 2])
local id, environment = opening[1], opening[4]

local state = redis.call('HGET', key('session', id), 'state')
if state and state ~= 'closed' then
  return {'exists'}
end
sweep(environment)
local elsewhere = redis.call('HGET', key('ticket', id), 'environment')
if elsewhere then
  sweep(elsewhere)
  if redis.call('EXISTS', key('ticket', id)) == 1 then
    return {'exists'}
  end
end

local waiting = redis.call('ZCARD', key('queue', environment))
local rank = first(key('free', environment))
if rank then
  -- A slot is only free while nobody waits: whoever frees one serves the queue in the same script.
  grant(opening, rank)
  return {'granted', redis.call('HGETALL', key('session', id))}
end
if tonumber(kept_s) <= 0 or waiting >= queue_max then
  return {'full', waiting}
end

local until_ms = after(kept_s)
for i, name in ipairs(OPENING) do
  redis.call('HSET', key('ticket', id), name, opening[i])
end
redis.call('ZADD', key('waits', environment), until_ms, id)
redis.call('ZADD', key('queue', environment), redis.call('INCR', key('number')), id)
redis.call('SADD', key('queues'), environment)
publish_wanted(environment)
return {'waiting'}

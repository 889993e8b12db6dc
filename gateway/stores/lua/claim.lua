-- Take a slot for an opening, or a place in the queue for one.
-- ARGV: the fields OPENING (idle_s and setup_s in seconds), how long its ticket counts (s; 0: it does not wait), how
-- many may wait
-- Returns {'granted', session}, {'waiting'}, {'exists'}, {'broken', time that is left (ms), message} or {'full', how many
-- wait, the place that it would have, pace (ms)}.

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

redis.call('HINCRBY', key('counts'), 'arrivals:' .. environment, 1)
local waiting = redis.call('ZCARD', key('waits', environment))
local rank = first(key('free', environment))
if rank and is_whole() then
  -- A slot is only free while nobody waits: whoever frees one serves the queue in the same script.
  redis.call('HINCRBY', key('counts'), 'hits:' .. environment, 1)
  grant(opening, rank)
  return {'granted', redis.call('HGETALL', key('session', id))}
end
local left_ms, message = broken(environment)
if left_ms then
  return {'broken', left_ms, message}
end
-- An owner that has nothing in a full queue may still take one place.
local most = redis.call('EXISTS', line(environment, opening[3])) == 0 and 2 * queue_max or queue_max
if tonumber(kept_s) <= 0 or waiting >= most then
  return {'full', waiting, outlook(environment, opening[3], false)}
end

enter(opening, after(kept_s))
publish_wanted(environment)
return {'waiting'}

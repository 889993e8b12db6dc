-- Take a slot for an opening, or a place in the queue.
-- ARGV: the fields OPENING (idle_s and setup_s in seconds), time for which its ticket is valid (s; 0: it does not
-- wait), maximum number of waiting openings
-- Returns {'granted', session}, {'waiting'}, {'exists'}, {'broken', time left (ms), message} or {'full', number of
-- waiting openings, the place that the opening would have, pace (ms)}.

local opening = {unpack(ARGV, 1, #OPENING)}
local kept_s, queue_max = ARGV[#OPENING + 1], tonumber(ARGV[#OPENING + 2])
local id, environment = opening[1], opening[4]

-- Grant *opening* a slot that is reserved for its group, or, while no opening waits, a slot that is not reserved. Some
-- slot is free. Return true if it was granted.
local function take(opening, waiting)
  local environment, group = opening[4], opening[GROUP]
  local reserved = group ~= '' and reserved_for(environment, group) or 0
  if reserved > 0 then
    local rank = choose(environment, home_of(environment, group))
    reserve(environment, group, reserved - 1, opening[TOGETHER_S])
    grant_member(opening, rank)
    return true
  end
  local need = group ~= '' and wanted(opening) or 1
  if waiting > 0 or count_available(environment, need) < need then
    return false
  end
  if group == '' then
    grant(opening, choose(environment))
    return true
  end
  local home = need > 1 and find_room(environment, need)
  grant_member(opening, choose(environment, home))
  if need > 1 then
    reserve(environment, group, need - 1, opening[TOGETHER_S], home)
  end
  return true
end

if is_unprivileged(opening) then
  opening[GROUP] = ''
end
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
if rank and is_whole() and take(opening, waiting) then
  redis.call('HINCRBY', key('counts'), 'hits:' .. environment, 1)
  return {'granted', redis.call('HGETALL', key('session', id))}
end
local left_ms, message = broken(environment)
if left_ms then
  return {'broken', left_ms, message}
end
-- An owner without a queued opening may still take one place in a full queue.
local most = redis.call('EXISTS', line(environment, opening[3])) == 0 and 2 * queue_max or queue_max
if tonumber(kept_s) <= 0 or waiting >= most then
  return {'full', waiting, outlook(environment, opening[3], false)}
end

if opening[GROUP] ~= '' then
  reserve(environment, opening[GROUP], 0) -- it waits for as many as it needs, whatever was kept for it
end
enter(opening, after(kept_s))
publish_wanted(environment)
if rank then
  -- The slot was reserved for a group until now, or kept for a waiting opening that was swept.
  serve(environment)
  if redis.call('HGET', key('session', id), 'lease') == opening[5] then
    return {'granted', redis.call('HGETALL', key('session', id))}
  end
end
return {'waiting'}

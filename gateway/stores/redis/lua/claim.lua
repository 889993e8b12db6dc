-- Take a slot for an opening, or a place in the queue.
-- ARGV: the fields OPENING (idle_s and setup_s in seconds), time for which its ticket is valid (s; 0: it does not
-- wait), maximum number of waiting openings
-- Returns {'granted', session}, {'waiting'}, {'exists'}, {'broken', time left (ms), message} or {'full', number of
-- waiting openings, number of slots that the opening needs, the place that it would have, pace (ms), the sessions that its
-- owner holds, in all and in the environment}.

local opening = {unpack(ARGV, 1, #OPENING)}
local kept_s, queue_max = ARGV[#OPENING + 1], tonumber(ARGV[#OPENING + 2])
local id, environment = opening[1], opening[4]

-- Return true if only owners other than *owner* wait for *environment*, each of them at its limit.
local function overtakes_none(environment, owner)
  for _, entry in ipairs(redis.call('ZRANGE', key('queue', environment), 0, -1)) do
    local other = string.sub(entry, RANK_DIGITS + 1)
    local id = head_of(environment, other)
    local ticket = id and redis.call('HMGET', key('ticket', id), unpack(OPENING)) or {}
    if other == owner or not ticket[1] or room_of(ticket) >= wanted(ticket) then
      return false
    end
  end
  return true
end

-- Grant *opening* one of the slots that are *reserved* for its group, or *need* slots that are not reserved and that no
-- waiting opening may take. Some slot is free, and the limits of the owner allow *need* sessions. Return true if it was
-- granted.
local function take(opening, waiting, reserved, need)
  local environment, group = opening[4], opening[GROUP]
  if reserved > 0 then
    local rank = choose(environment, home_of(environment, group))
    reserve(environment, group, reserved - 1, opening[TOGETHER_S])
    grant_member(opening, rank)
    return true
  end
  if count_available(environment, need) < need or (waiting > 0 and not overtakes_none(environment, opening[3])) then
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

local reserved = opening[GROUP] ~= '' and reserved_for(environment, opening[GROUP]) or 0
local need = reserved > 0 and 1 or wanted(opening)
local is_allowed = room_of(opening) >= need
if is_allowed then
  redis.call('HINCRBY', key('counts'), 'arrivals:' .. environment, 1)
end
local waiting = redis.call('ZCARD', key('waits', environment))
local rank = first(key('free', environment))
if rank and is_allowed and is_whole() and take(opening, waiting, reserved, need) then
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
  return {'full', waiting, need, outlook(environment, opening[3], false)}
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

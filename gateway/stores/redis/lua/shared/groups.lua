-- Groups ------------------------------------------------------------------------------------------------------------

-- Openings of one group start together: the first opening takes slots for all members, or waits until enough slots are
-- free. Slots of members that have not arrived yet are reserved: free, but only for them. Slots stay free for
-- together_s while the group waits for more, and then again for together_s while members are missing.
-- A group that fits one worker goes to this worker, its home. While it has slots reserved there, other openings go
-- elsewhere.

-- Both values as in retry_after.py.
local GROUP_KEPT_MS = 600000
local LAST_CALL_MS = 3000

-- Number of workers, those with the fewest sessions, that are checked for room for a group.
local LOOKED_AT = 64

-- Return the number of further sessions that the worker of *rank*, which holds *used* sessions, accepts.
local function room_in(rank, used)
  local has = redis.call('HMGET', key('worker', string.sub(rank, RANK_DIGITS + 1)), 'slots', 'max_uses', 'uses')
  if not has[1] then
    return 0
  end
  local room = tonumber(has[1]) - tonumber(used)
  return has[2] == '0' and room or math.min(room, tonumber(has[2]) - tonumber(has[3]))
end

-- Return the number of free slots of *environment*, at most *enough*.
local function count_free(environment, enough)
  local count = 0
  local free = redis.call('ZRANGE', key('free', environment), 0, enough - 1, 'WITHSCORES')
  for i = 1, #free, 2 do
    count = count + room_in(free[i], free[i + 1])
    if count >= enough then
      return enough
    end
  end
  return count
end

-- Return the number of slots reserved for *group*, for all groups ('total'), or in one worker ('at:' and its rank).
local function reserved_for(environment, group)
  return tonumber(redis.call('HGET', key('reserve', environment), group) or '0')
end

-- Return the number of free slots of *environment* that are not reserved for a group, at most *enough*.
local function count_available(environment, enough)
  local reserved = reserved_for(environment, 'total')
  if reserved == 0 and enough == 1 then
    return math.min(1, redis.call('ZCARD', key('free', environment))) -- as with every opening that has no group
  end
  return math.max(0, count_free(environment, enough + reserved) - reserved)
end

-- Return the rank of the worker with the fewest sessions that has *need* free slots without a reservation; else nil.
local function find_room(environment, need)
  local free = redis.call('ZRANGE', key('free', environment), 0, LOOKED_AT - 1, 'WITHSCORES')
  for i = 1, #free, 2 do
    if room_in(free[i], free[i + 1]) - reserved_for(environment, 'at:' .. free[i]) >= need then
      return free[i]
    end
  end
end

-- Return the rank of the worker for the next session of *environment*: *home*, if it has room. A slot must be free.
local function choose(environment, home)
  if home and redis.call('ZSCORE', key('free', environment), home) then
    return home
  end
  local rank = first(key('free', environment))
  return reserved_for(environment, 'total') > 0 and find_room(environment, 1) or rank
end

-- Return the rank of the worker in which all reserved slots of *group* are, if there is one.
local function home_of(environment, group)
  return redis.call('HGET', key('reserve', environment), 'home:' .. group)
end

-- Reserve *count* slots for a group, in place of its earlier reservation, for *together_s* from its first reservation
-- on. The *home* of the first reservation stays.
local function reserve(environment, group, count, together_s, home)
  local had = reserved_for(environment, group)
  home = home or home_of(environment, group)
  if home and count ~= had then
    redis.call('HINCRBY', key('reserve', environment), 'at:' .. home, whole(count - had))
  end
  if count > 0 then
    redis.call('HSET', key('reserve', environment), group, whole(count))
    if home then
      redis.call('HSET', key('reserve', environment), 'home:' .. group, home)
    end
    redis.call('ZADD', key('lapse', environment), 'NX', after(together_s), group)
    redis.call('SADD', key('reserving'), environment)
  elseif had > 0 then
    redis.call('HDEL', key('reserve', environment), group, 'home:' .. group)
    redis.call('ZREM', key('lapse', environment), group)
  end
  if count ~= had and redis.call('HINCRBY', key('reserve', environment), 'total', whole(count - had)) <= 0 then
    redis.call('DEL', key('reserve', environment), key('lapse', environment))
    redis.call('SREM', key('reserving'), environment)
  end
end

-- Mark a group's time as over: later openings of the group get their slots separately.
local function part(group)
  redis.call('HSET', key('group', group), 'parted', 1)
  redis.call('PEXPIRE', key('group', group), GROUP_KEPT_MS)
end

-- Release the slots reserved for members that did not arrive in time.
local function let_go(environment)
  for _, group in ipairs(redis.call('ZRANGEBYSCORE', key('lapse', environment), '-inf', whole(now))) do
    local owner = redis.call('HGET', key('group', group), 'owner')
    if owner and reserved_for(environment, group) > count_come(group) then
      note_unfilled(owner)
    end
    reserve(environment, group, 0)
    part(group)
  end
end

-- Return the number of slots that *opening* needs: those of its group's members without one, itself included. An opening
-- without a group, or of a parted group, needs 1.
local function wanted(opening)
  if (opening[GROUP] or '') == '' then
    return 1
  end
  local known = redis.call('HMGET', key('group', opening[GROUP]), 'granted', 'parted')
  return known[2] and 1 or math.max(1, tonumber(opening[GROUP_SIZE]) - tonumber(known[1] or '0'))
end

-- Return the number of openings that have not arrived yet, of the groups that wait for *environment*: in all, and by
-- owner.
local function count_to_come(environment)
  local count, counts = 0, {}
  for _, group in ipairs(redis.call('SMEMBERS', key('groups', environment))) do
    local ids = redis.call('ZRANGE', members(group), 0, -1)
    local ticket = ids[1] and redis.call('HMGET', key('ticket', ids[1]), unpack(OPENING)) or {}
    if ticket[1] then
      local missing = math.max(0, wanted(ticket) - #ids)
      count = count + missing
      counts[ticket[3]] = (counts[ticket[3]] or 0) + missing
    end
  end
  return count, counts
end

-- Return the owners that wait for *environment* and have limits, and the number of further sessions that these allow.
local function list_limited(environment)
  local rooms = {}
  for _, entry in ipairs(redis.call('ZRANGE', key('queue', environment), 0, -1)) do
    local owner = string.sub(entry, RANK_DIGITS + 1)
    local id = head_of(environment, owner)
    local room = id and room_of(redis.call('HMGET', key('ticket', id), unpack(OPENING))) or math.huge
    if room < math.huge then
      rooms[owner] = room
    end
  end
  return rooms
end

-- Return the number of openings that wait for *environment*, and of members to come (by owner), that exceed the limits of
-- their owners.
local function count_over_limit(environment, to_come)
  local count = 0
  for owner, room in pairs(list_limited(environment)) do
    local openings = redis.call('ZCARD', line(environment, owner)) + (to_come[owner] or 0)
    count = count + math.max(0, openings - room)
  end
  return count
end

-- Grant *opening*, a member of a group, a slot of the worker of *rank*, and reserve no more slots than members can
-- still arrive.
local function grant_member(opening, rank)
  local environment, group = opening[4], opening[GROUP]
  local granted = redis.call('HINCRBY', key('group', group), 'granted', 1)
  redis.call('HSET', key('group', group), 'owner', opening[3])
  redis.call('PEXPIRE', key('group', group), GROUP_KEPT_MS)
  local left = math.max(0, tonumber(opening[GROUP_SIZE]) - granted)
  if reserved_for(environment, group) > left then
    reserve(environment, group, left, opening[TOGETHER_S])
  end
  grant(opening, rank)
end

-- Return up to *most* waiting openings of a group, and the shortest time (ms) that one of them still waits. Drop late
-- openings.
local function waiting_of(environment, group, owner, most)
  local found, least_ms = {}, math.huge
  for _, id in ipairs(redis.call('ZRANGE', members(group), 0, -1)) do
    local ticket = redis.call('HMGET', key('ticket', id), unpack(OPENING))
    local until_ms = redis.call('ZSCORE', key('waits', environment), id)
    local is_late = until_ms and tonumber(until_ms) <= now or is_gone(ticket[10])
    if not ticket[1] or not until_ms then
      leave_group(environment, group, id)
    elseif is_late and is_believed() then
      drop(environment, id, owner)
    elseif #found < most then
      found[#found + 1] = ticket
      least_ms = math.min(least_ms, tonumber(until_ms) - now)
    end
  end
  return found, least_ms
end

-- Return true if a group at the head of the queue has kept free slots from other openings long enough.
local function is_impatient(opening, least_ms)
  if least_ms <= LAST_CALL_MS then
    return true
  end
  if redis.call('HSETNX', key('group', opening[GROUP]), 'kept_ms', whole(now)) == 1 then
    note_come(opening[GROUP])
  end
  redis.call('PEXPIRE', key('group', opening[GROUP]), GROUP_KEPT_MS)
  local kept_ms = tonumber(redis.call('HGET', key('group', opening[GROUP]), 'kept_ms'))
  return now - kept_ms >= tonumber(opening[TOGETHER_S]) * 1000
end

-- Serve the group of *opening*, which is first in the queue: all members together, or, once the group has waited long
-- enough, as many as there are free slots. The owner's limits bound both. Return the number of granted slots; 0: the
-- group still waits. Then also return true if less than half of it has come, or if the limits do not allow all of it, so
-- that other owners take free slots.
local function serve_group(opening, owner, round)
  local environment, group = opening[4], opening[GROUP]
  local need = wanted(opening)
  local found, least_ms = waiting_of(environment, group, owner, need)
  local room = room_of(opening)
  local available = math.min(count_available(environment, need), room)
  local absent = need - #found
  if available == 0 or (available < need and not is_impatient(opening, least_ms)) then
    local has_parted = redis.call('HEXISTS', key('group', group), 'parted') == 1
    local is_gathering = not has_parted and 2 * count_come(group) < tonumber(opening[GROUP_SIZE])
    return 0, room < need or is_gathering
  end
  if available < need then
    if absent > count_come(group) and redis.call('HEXISTS', key('group', group), 'kept_ms') == 1 then
      note_unfilled(owner)
    end
    part(group)
  end
  local count = math.min(#found, available)
  local kept = available == need and need - count or 0
  local home = count + kept > 1 and find_room(environment, count + kept)
  for i = 1, count do
    leave(environment, found[i][1], owner, true)
    grant_member(found[i], choose(environment, home))
    wake(found[i][10], found[i][5])
  end
  if kept > 0 then
    reserve(environment, group, kept, opening[TOGETHER_S], home)
  end
  -- Each slot, and each member that has not come, uses one turn of the owner.
  round = round + count + absent
  list_owner(environment, owner, round)
  if not head_of(environment, owner) then
    note_next_round(environment, owner, round)
  end
  return count
end

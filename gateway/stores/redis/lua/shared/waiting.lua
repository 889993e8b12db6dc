-- Replicas, and openings that wait in queues.

-- Replicas ----------------------------------------------------------------------------------------------------------

-- Milliseconds without a call of lead.lua after which a replica's waiting openings and opening sessions are given up.
-- Each replica calls it every half second.
local SILENT_MS = 5000

-- Return true if *replica* (nil: unknown) is gone. A replica that never called may just have started. A server that
-- restarts with older data has older signs of life, so a replica gets this time again from the first call of any replica.
local function is_gone(replica)
  local heard_ms = replica and redis.call('HGET', key('replicas'), replica)
  if not heard_ms or tonumber(heard_ms) >= now - SILENT_MS then
    return false
  end
  local heard_run, since_ms = string.match(redis.call('GET', key('heard_run')) or '', '^(%x+) (%d+)$')
  return heard_run == run() and tonumber(since_ms) < now - SILENT_MS
end

-- Note that an opening is over, with any result. Return the owner and environment of its session.
local function settled(id)
  local session = redis.call('HMGET', key('session', id), 'replica', 'owner', 'environment')
  if session[1] then
    redis.call('HDEL', key('openings', session[1]), id)
  end
  return session[2], session[3]
end

-- Waiting -----------------------------------------------------------------------------------------------------------

-- The fields of an opening, in the order of claim.lua's arguments. A ticket is a hash of these fields.
local OPENING = {'id', 'name', 'owner', 'environment', 'lease', 'fingerprint', 'idle_s', 'setup_s', 'task', 'replica',
  'episode', 'policy', 'group', 'group_size', 'together_s', 'is_use', 'max_sessions', 'max_here'}

local GROUP, GROUP_SIZE, TOGETHER_S, IS_USE, MAX_SESSIONS, MAX_HERE = 13, 14, 15, 16, 17, 18

local function first(zset)
  return redis.call('ZRANGE', zset, 0, 0)[1]
end

-- Number of digits of the numbers at the start of sorted set members. Members of equal score are sorted by them. So a
-- worker's rank is its number and its id, older workers first.
local RANK_DIGITS = 16

-- Owners take turns. A queue lists the owners with openings, sorted by the round that serves the owner's next opening,
-- and within a round by this opening's arrival number. A line has the openings of one owner, in order of arrival.

-- Return the key of the line of *owner*. Environment names contain no colon.
local function line(environment, owner)
  return key('line', environment .. ':' .. owner)
end

local function listed(number, owner)
  return string.format('%0' .. RANK_DIGITS .. '.0f', tonumber(number)) .. owner
end

local function head_of(environment, owner)
  return first(line(environment, owner))
end

local function list_owner(environment, owner, round)
  local head = redis.call('ZRANGE', line(environment, owner), 0, 0, 'WITHSCORES')
  if head[1] then
    redis.call('ZADD', key('queue', environment), round, listed(head[2], owner))
  end
end

-- Remember the round of the next turn of an owner that leaves the queue, until the queue is empty.
local function note_next_round(environment, owner, round)
  if redis.call('EXISTS', key('round', environment)) == 1 then
    redis.call('HSET', key('round', environment), 'next:' .. owner, whole(tonumber(round)))
  end
end

-- Delete the round when the queue is empty.
local function end_queue(environment)
  if redis.call('EXISTS', key('queue', environment)) == 0 then
    redis.call('SREM', key('queues'), environment)
    redis.call('DEL', key('round', environment))
  end
end

-- Return the key of the waiting members of a group, sorted by arrival.
local function members(group)
  return key('members', group)
end

local function leave_group(environment, group, id)
  redis.call('ZREM', members(group), id)
  if redis.call('EXISTS', members(group)) == 0 then
    redis.call('SREM', key('groups', environment), group)
  end
end

-- A key whose group kept slots from others, and of which less than half came, loses the privilege for this time. As in
-- retry_after.py.
local UNFILLED_MS = 60000

local function note_unfilled(owner)
  redis.call('SET', key('unfilled', owner), 1, 'PX', UNFILLED_MS)
end

-- Return true if *opening*, the first of its group, starts individually.
local function is_unprivileged(opening)
  local group = opening[GROUP]
  return group ~= '' and redis.call('EXISTS', key('unfilled', opening[3])) == 1
    and redis.call('EXISTS', key('group', group), members(group)) == 0
end

-- Return the number of members of a group that have a slot or wait for one.
local function count_come(group)
  return tonumber(redis.call('HGET', key('group', group), 'granted') or '0') + redis.call('ZCARD', members(group))
end

-- Note how many members have come, the largest number since the group has kept slots from others.
local function note_come(group)
  local came = tonumber(redis.call('HGET', key('group', group), 'came') or '0')
  redis.call('HSET', key('group', group), 'came', whole(math.max(came, count_come(group))))
end

-- Note that an opening of a group, of *size* openings, left the queue without a slot. The key is unprivileged if the
-- group kept slots from others and less than half of it ever came.
local function abandon(group, size, owner)
  if redis.call('EXISTS', members(group)) == 1 then
    return
  end
  local known = redis.call('HMGET', key('group', group), 'kept_ms', 'parted', 'came')
  if known[1] and not known[2] and 2 * tonumber(known[3] or '0') < tonumber(size) then
    note_unfilled(owner)
  end
end

-- Add *opening* (values in the order of OPENING) to the queue. An owner without a queued opening joins the round after
-- the current round, or the round of its next turn if that is later.
local function enter(opening, until_ms)
  local id, owner, environment = opening[1], opening[3], opening[4]
  for i, name in ipairs(OPENING) do
    redis.call('HSET', key('ticket', id), name, opening[i])
  end
  redis.call('ZADD', key('waits', environment), until_ms, id)
  if redis.call('SADD', key('queues'), environment) == 1 then
    redis.call('HSET', key('round', environment), 'number', 0, 'at_ms', whole(now))
  end
  local number = redis.call('INCR', key('number'))
  if redis.call('ZADD', line(environment, owner), number, id) == 1
    and redis.call('ZCARD', line(environment, owner)) == 1 then
    local known = redis.call('HMGET', key('round', environment), 'number', 'next:' .. owner)
    list_owner(environment, owner, math.max(tonumber(known[1] or '0') + 1, tonumber(known[2] or '0')))
  end
  if opening[GROUP] ~= '' then
    redis.call('ZADD', members(opening[GROUP]), number, id)
    if redis.call('HEXISTS', key('group', opening[GROUP]), 'kept_ms') == 1 then
      note_come(opening[GROUP])
    end
    redis.call('SADD', key('groups', environment), opening[GROUP])
  end
end

-- Remove the ticket of *owner*. The owner's later openings keep its round, or get *round* if the ticket is served.
-- *is_served*: the ticket gets a slot.
local function leave(environment, id, owner, is_served, round)
  local head = redis.call('ZRANGE', line(environment, owner), 0, 0, 'WITHSCORES')
  local ticket = redis.call('HMGET', key('ticket', id), 'group', 'group_size')
  if ticket[1] and ticket[1] ~= '' then
    leave_group(environment, ticket[1], id)
    if not is_served then
      abandon(ticket[1], ticket[2], owner)
    end
  end
  redis.call('ZREM', line(environment, owner), id)
  redis.call('ZREM', key('waits', environment), id)
  redis.call('DEL', key('ticket', id))
  if head[1] == id then
    local was = listed(head[2], owner)
    round = round or redis.call('ZSCORE', key('queue', environment), was) or '0'
    redis.call('ZREM', key('queue', environment), was)
    list_owner(environment, owner, round)
    if not head_of(environment, owner) then
      note_next_round(environment, owner, round)
    end
  end
  end_queue(environment)
end

-- Seconds for which a replica can fetch the reason why its opening failed.
local FAILED_KEPT_S = 60

-- Remove a ticket whose time has passed, and wake its replica's claim. Record that the ticket was late and not lost.
local function drop(environment, id, owner)
  local ticket = redis.call('HMGET', key('ticket', id), 'replica', 'lease', 'owner')
  redis.call('ZREM', key('waits', environment), id)
  if owner or ticket[3] then
    leave(environment, id, owner or ticket[3])
  end
  if ticket[1] then
    redis.call('SET', key('failed', ticket[2]), 'late', 'EX', FAILED_KEPT_S)
    wake(ticket[1], ticket[2])
  end
end

-- Return true if the time is reliable. Each replica calls lead.lua every half second, which also detects a jump of the
-- clock. Before the detection, every waiting opening would seem late.
local BELIEVED_MS = 5000
local function is_believed()
  local heard_ms = redis.call('GET', key('heard'))
  return not heard_ms or math.abs(now - tonumber(heard_ms)) < BELIEVED_MS
end

-- Drop at most 1000 tickets whose time has passed, so that no script takes long. The grant skips the rest.
local function sweep(environment)
  if not is_believed() then
    return
  end
  local late = redis.call('ZRANGEBYSCORE', key('waits', environment), '-inf', whole(now), 'LIMIT', 0, 1000)
  for _, id in ipairs(late) do
    drop(environment, id)
  end
end

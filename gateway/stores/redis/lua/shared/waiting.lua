-- Replicas, and openings that wait in queues.

-- Replicas ----------------------------------------------------------------------------------------------------------

-- How long a replica may be silent (ms) before what it waits for, and what it is opening, is given up: each calls lead.lua
-- every half second.
local SILENT_MS = 5000

-- Whether *replica* (nil: not known) is gone; one that was never heard of may just begin.
local function is_gone(replica)
  local heard_ms = replica and redis.call('HGET', key('replicas'), replica)
  return heard_ms and tonumber(heard_ms) < now - SILENT_MS
end

-- Note that an opening is over, whatever became of it.
local function settled(id)
  local replica = redis.call('HGET', key('session', id), 'replica')
  if replica then
    redis.call('HDEL', key('openings', replica), id)
  end
end

-- Waiting -----------------------------------------------------------------------------------------------------------

-- The fields of an opening, in the order in which claim.lua gets them and a ticket keeps them.
local OPENING = {'id', 'name', 'owner', 'environment', 'lease', 'fingerprint', 'idle_s', 'setup_s', 'task', 'replica',
  'episode', 'policy', 'group', 'group_size', 'together_s', 'is_use'}

local GROUP, GROUP_SIZE, TOGETHER_S, IS_USE = 13, 14, 15, 16

local function first(zset)
  return redis.call('ZRANGE', zset, 0, 0)[1]
end

-- Numbers that lead a member of a sorted set have as many digits as this: members of equal score are sorted by them. So
-- a worker's rank is its number and its id, older first.
local RANK_DIGITS = 16

-- Owners take turns: a queue lists those that have openings in it, each by the round in which its next one is served, and
-- within a round by the arrival number of that one. The openings of one owner stand in its line, in order of arrival.

-- The line of *owner*; no environment's name has a colon.
local function line(environment, owner)
  return key('line', environment .. ':' .. owner)
end

local function listed(number, owner)
  return string.format('%0' .. RANK_DIGITS .. '.0f', tonumber(number)) .. owner
end

local function list_owner(environment, owner, round)
  local head = redis.call('ZRANGE', line(environment, owner), 0, 0, 'WITHSCORES')
  if head[1] then
    redis.call('ZADD', key('queue', environment), round, listed(head[2], owner))
  end
end

-- Forget the round when nobody waits any more.
local function end_queue(environment)
  if redis.call('EXISTS', key('queue', environment)) == 0 then
    redis.call('SREM', key('queues'), environment)
    redis.call('DEL', key('round', environment))
  end
end

-- Those of a group that wait, in order of arrival.
local function members(group)
  return key('members', group)
end

local function leave_group(environment, group, id)
  redis.call('ZREM', members(group), id)
  if redis.call('EXISTS', members(group)) == 0 then
    redis.call('SREM', key('groups', environment), group)
  end
end

-- Let *opening* (values in the order of OPENING) wait. An owner that has nothing in the queue joins the round after the
-- one that is being served.
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
    list_owner(environment, owner, tonumber(redis.call('HGET', key('round', environment), 'number') or '0') + 1)
  end
  if opening[GROUP] ~= '' then
    redis.call('ZADD', members(opening[GROUP]), number, id)
    redis.call('SADD', key('groups', environment), opening[GROUP])
  end
end

-- Take the ticket of *owner* out. Those behind it keep the owner's round, or get *round*.
local function leave(environment, id, owner, round)
  local head = redis.call('ZRANGE', line(environment, owner), 0, 0, 'WITHSCORES')
  local group = redis.call('HGET', key('ticket', id), 'group')
  if group and group ~= '' then
    leave_group(environment, group, id)
  end
  redis.call('ZREM', line(environment, owner), id)
  redis.call('ZREM', key('waits', environment), id)
  redis.call('DEL', key('ticket', id))
  if head[1] == id then
    local was = listed(head[2], owner)
    round = round or redis.call('ZSCORE', key('queue', environment), was) or '0'
    redis.call('ZREM', key('queue', environment), was)
    list_owner(environment, owner, round)
  end
  end_queue(environment)
end

-- How long a replica has to fetch why its opening failed (s).
local FAILED_KEPT_S = 60

-- Take a ticket whose time has passed out of the queue and tell its replica, if that lives, to look; that it was not lost
-- is kept.
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

-- Whether the time can be believed: some replica calls lead.lua every half second, which also notices a jump of the
-- clock. Until it has, whoever waits would seem to have waited for too long.
local BELIEVED_MS = 5000
local function is_believed()
  local heard_ms = redis.call('GET', key('heard'))
  return not heard_ms or math.abs(now - tonumber(heard_ms)) < BELIEVED_MS
end

-- Drop tickets whose time has passed, at most 1000 so that no script takes long; the grant skips the rest.
local function sweep(environment)
  if not is_believed() then
    return
  end
  local late = redis.call('ZRANGEBYSCORE', key('waits', environment), '-inf', whole(now), 'LIMIT', 0, 1000)
  for _, id in ipairs(late) do
    drop(environment, id)
  end
end

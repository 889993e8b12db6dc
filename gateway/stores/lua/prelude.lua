-- What the operations share; the loader puts this file before each of them.
-- KEYS: the hash tag that heads every key. The others are derived from it: which session a freed slot goes to, and so
-- which keys are written, is known to the script alone. One tag keeps them in one slot of a cluster.
-- Moments are milliseconds of the store's clock: Redis' TIME less the jumps that lead.lua noticed.

local root = KEYS[1]

local function key(kind, name)
  if name then
    return root .. ':' .. kind .. ':' .. name
  end
  return root .. ':' .. kind
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
now = now - tonumber(redis.call('GET', key('jumped')) or '0')

-- Lua writes large numbers as 1.7e+12 unless told otherwise.
local function whole(number)
  return string.format('%.0f', number)
end

local function after(seconds)
  return whole(now + math.ceil(tonumber(seconds) * 1000))
end

local function publish_ended(id, lease)
  redis.call('PUBLISH', key('notices'), 'ended:' .. lease .. ':' .. id)
end

local function publish_wanted(environment)
  redis.call('PUBLISH', key('notices'), 'wanted:' .. environment)
end

local function wake(replica, lease)
  redis.call('PUBLISH', key('replica', replica), lease)
end

-- Waiting -----------------------------------------------------------------------------------------------------------

-- The fields of an opening, in the order in which claim.lua gets them and a ticket keeps them.
local OPENING = {'id', 'name', 'owner', 'environment', 'lease', 'fingerprint', 'idle_s', 'setup_s', 'task', 'replica',
  'episode'}

local function first(zset)
  return redis.call('ZRANGE', zset, 0, 0)[1]
end

local function leave(environment, id)
  redis.call('ZREM', key('waits', environment), id)
  redis.call('ZREM', key('queue', environment), id)
  redis.call('DEL', key('ticket', id))
  if redis.call('EXISTS', key('queue', environment)) == 0 then
    redis.call('SREM', key('queues'), environment)
  end
end

-- Take a ticket out of the queue and tell its replica, if that lives, to look.
local function drop(environment, id)
  local ticket = redis.call('HMGET', key('ticket', id), 'replica', 'lease')
  leave(environment, id)
  if ticket[1] then
    wake(ticket[1], ticket[2])
  end
end

-- Drop tickets whose time has passed, at most 1000 so that no script takes long; the grant skips the rest.
local function sweep(environment)
  local late = redis.call('ZRANGEBYSCORE', key('waits', environment), '-inf', whole(now), 'LIMIT', 0, 1000)
  for _, id in ipairs(late) do
    drop(environment, id)
  end
end

-- Slots -------------------------------------------------------------------------------------------------------------

-- A worker's rank is its number, in as many digits as this, and its id: equal scores are sorted by it, older first.
local RANK_DIGITS = 16

local function drain(worker, environment, rank)
  redis.call('HSET', key('worker', worker), 'state', 'draining')
  redis.call('ZREM', key('free', environment), rank)
  publish_wanted(environment)
end

-- List the worker among the free ones under the number of slots that it holds, or not at all if it is full.
local function list_free(worker, environment, rank, used, slots)
  if used < slots then
    redis.call('ZADD', key('free', environment), used, rank)
  else
    redis.call('ZREM', key('free', environment), rank)
  end
end

-- Make *opening* (values in the order of OPENING) a session in the worker of *rank*, which is ready and has room.
local function grant(opening, rank)
  local worker = string.sub(rank, RANK_DIGITS + 1)
  local id, environment = opening[1], opening[4]
  local has = redis.call('HMGET', key('worker', worker), 'slots', 'max_uses', 'address')
  redis.call('DEL', key('session', id))
  redis.call('HSET', key('session', id), 'id', id, 'name', opening[2], 'owner', opening[3],
    'environment', environment, 'lease', opening[5], 'fingerprint', opening[6], 'idle_s', opening[7],
    'task', opening[9], 'episode', opening[11], 'worker', worker, 'address', has[3], 'state', 'opening')
  redis.call('ZADD', key('deadlines'), after(opening[8]), id)
  redis.call('SADD', key('held', worker), id)
  local uses = redis.call('HINCRBY', key('worker', worker), 'uses', 1)
  local max_uses = tonumber(has[2])
  if max_uses > 0 and uses >= max_uses then
    drain(worker, environment, rank)
  else
    list_free(worker, environment, rank, redis.call('SCARD', key('held', worker)), tonumber(has[1]))
  end
end

-- Give free slots to those that wait, first come, first served; a ticket whose time has passed is skipped.
local function serve(environment)
  while true do
    local rank = first(key('free', environment))
    local id = rank and first(key('queue', environment))
    if not id then
      return
    end
    local ticket = redis.call('HMGET', key('ticket', id), unpack(OPENING))
    local until_ms = redis.call('ZSCORE', key('waits', environment), id)
    if ticket[1] and until_ms and tonumber(until_ms) > now then
      leave(environment, id)
      grant(ticket, rank)
      wake(ticket[10], ticket[5])
    else
      drop(environment, id)
    end
  end
end

-- Take a slot back from session *id* and hand it to the next that waits.
local function free(worker, environment, id)
  redis.call('SREM', key('held', worker), id)
  local has = redis.call('HMGET', key('worker', worker), 'state', 'rank', 'slots')
  local used = redis.call('SCARD', key('held', worker))
  if used == 0 then
    redis.call('HSET', key('worker', worker), 'idle_ms', whole(now))
  end
  if has[1] == 'ready' then
    list_free(worker, environment, has[2], used, tonumber(has[3]))
    serve(environment)
  elseif used == 0 then
    publish_wanted(environment)
  end
end

-- Sessions ----------------------------------------------------------------------------------------------------------

local function begin_close(id, reason, closing_s)
  redis.call('HSET', key('session', id), 'state', 'closing', 'reason', reason)
  redis.call('ZADD', key('deadlines'), after(closing_s), id)
  publish_ended(id, redis.call('HGET', key('session', id), 'lease'))
end

-- Drop a live session. Why it ended is remembered for *kept_s*, unless its trainer did it ('deleted') or never knew
-- of it (false).
local function forget(id, lease, reason, kept_s)
  redis.call('ZREM', key('deadlines'), id)
  redis.call('DEL', key('session', id))
  if reason and reason ~= 'deleted' then
    redis.call('HSET', key('session', id), 'state', 'closed', 'lease', lease, 'reason', reason)
    redis.call('PEXPIRE', key('session', id), whole(math.ceil(tonumber(kept_s) * 1000)))
  end
end

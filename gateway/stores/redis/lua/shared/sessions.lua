-- Sessions ----------------------------------------------------------------------------------------------------------

-- Begin to close a session, which should be released in *closing_s*; returns it.
local function begin_close(id, reason, closing_s)
  settled(id)
  redis.call('HSET', key('session', id), 'state', 'closing', 'reason', reason)
  redis.call('ZADD', key('deadlines'), after(closing_s), id)
  publish_ended(id, redis.call('HGET', key('session', id), 'lease'))
  return redis.call('HGETALL', key('session', id))
end

-- List up to *limit* sessions whose deadline has passed, earliest first: those that are open, or the others. None has
-- passed for sure while the store is rebuilt.
local function passed(limit, is_open)
  local found, seen = {}, 0
  while is_whole() and #found < limit do
    local ids = redis.call('ZRANGEBYSCORE', key('deadlines'), '-inf', whole(now), 'LIMIT', seen, limit)
    for _, id in ipairs(ids) do
      local state = redis.call('HGET', key('session', id), 'state')
      if not state then
        -- Another client deleted the session's key; its deadline must not come up for ever.
        redis.call('ZREM', key('deadlines'), id)
      else
        seen = seen + 1
        if (state == 'open') == is_open and #found < limit then
          found[#found + 1] = id
        end
      end
    end
    if #ids < limit then
      break
    end
  end
  return found
end

-- Read the sessions of *ids*.
local function read_all(ids)
  local sessions = {}
  for i, id in ipairs(ids) do
    sessions[i] = redis.call('HGETALL', key('session', id))
  end
  return sessions
end

-- Whether *reason* says that a session's trainer ended it: from then on it is unknown.
local function is_trainers(reason)
  return reason == 'deleted' or reason == 'cancelled'
end

-- Drop a live session. Why it ended is remembered for *kept_s*, unless its trainer did it or never knew of it (false).
local function forget(id, lease, reason, kept_s)
  settled(id)
  redis.call('ZREM', key('deadlines'), id)
  redis.call('DEL', key('session', id))
  if reason and not is_trainers(reason) then
    redis.call('HSET', key('session', id), 'state', 'closed', 'lease', lease, 'reason', reason)
    redis.call('PEXPIRE', key('session', id), whole(math.ceil(tonumber(kept_s) * 1000)))
  end
end

-- Workers, and rebuilding -------------------------------------------------------------------------------------------

-- The fields of a worker, in the order in which scripts get them and load.lua tells them.
local WORKER = {'id', 'environment', 'digest', 'slots', 'max_uses', 'address', 'state'}

-- Register a worker; *values* are its fields. Returns its rank.
local function enlist(values)
  local id = values[1]
  local number = redis.call('INCR', key('number'))
  local rank = string.format('%0' .. RANK_DIGITS .. '.0f', number) .. id
  redis.call('HSET', key('worker', id), 'id', id, 'environment', values[2], 'digest', values[3], 'slots', values[4],
    'max_uses', values[5], 'address', values[6], 'state', values[7], 'rank', rank, 'uses', 0, 'added_ms', whole(now),
    'idle_ms', whole(now))
  redis.call('ZADD', key('workers'), number, id)
  return rank
end

-- Make *worker* (its state, environment and rank) ready with *slots*, and give them to those that wait; the breaker of its
-- environment is closed.
local function make_ready(id, worker, slots)
  redis.call('HSET', key('worker', id), 'state', 'ready', 'slots', slots, 'idle_ms', whole(now))
  list_free(id, worker[2], worker[3], redis.call('SCARD', key('held', id)), tonumber(slots))
  redis.call('HDEL', key('breakers'), worker[2])
  serve(worker[2])
  return 1
end

-- The fields of a session as adopt.lua and restore.lua get them.
local SESSION = {'id', 'name', 'owner', 'lease', 'fingerprint', 'idle_s', 'task', 'episode', 'policy', 'handle',
  'worker', 'address'}

-- Read the sessions in ARGV from *at* on, *count* of them.
local function read_sessions(at, count)
  local sessions = {}
  for n = 1, count do
    local session = {}
    for i, name in ipairs(SESSION) do
      session[name] = ARGV[at + (n - 1) * #SESSION + i - 1]
    end
    sessions[n] = session
  end
  return sessions
end

-- Make *session*, which somebody serves and this store does not hold, an open one of its worker, and a use of it.
local function take_in(session)
  local id, worker = session.id, session.worker
  local has = redis.call('HMGET', key('worker', worker), 'environment', 'address')
  local ticket = redis.call('HGET', key('ticket', id), 'environment')
  if ticket then
    drop(ticket, id) -- of an older state: what it asked for is here
  end
  redis.call('DEL', key('session', id))
  redis.call('HSET', key('session', id), 'id', id, 'name', session.name, 'owner', session.owner, 'environment', has[1],
    'lease', session.lease, 'fingerprint', session.fingerprint, 'idle_s', session.idle_s, 'task', session.task,
    'episode', session.episode, 'policy', session.policy, 'handle', session.handle, 'worker', worker,
    'address', has[2] ~= '' and has[2] or session.address, 'state', 'open')
  redis.call('ZADD', key('deadlines'), after(session.idle_s), id)
  if redis.call('SADD', key('held', worker), id) == 1 then
    redis.call('HINCRBY', key('worker', worker), 'uses', 1)
  end
end

-- List a worker as its sessions have it, once some were taken in.
local function relist(worker)
  local has = redis.call('HMGET', key('worker', worker), 'state', 'environment', 'rank', 'slots', 'max_uses', 'uses')
  local used = redis.call('SCARD', key('held', worker))
  if has[1] == 'paused' and used > 0 then
    has[1] = 'ready' -- it was woken since
    redis.call('HSET', key('worker', worker), 'state', 'ready')
  end
  if has[1] ~= 'ready' then
    return
  end
  if tonumber(has[5]) > 0 and tonumber(has[6]) >= tonumber(has[5]) then
    drain(worker, has[2], has[3])
  else
    list_free(worker, has[2], has[3], used, tonumber(has[4]))
    serve(has[2])
  end
end

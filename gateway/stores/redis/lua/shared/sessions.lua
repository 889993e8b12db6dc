-- Sessions ----------------------------------------------------------------------------------------------------------

-- Start to close a session, which should be released within *closing_s*. Return the session.
local function begin_close(id, reason, closing_s)
  settled(id)
  redis.call('HSET', key('session', id), 'state', 'closing', 'reason', reason)
  redis.call('ZADD', key('deadlines'), after(closing_s), id)
  publish_ended(id, redis.call('HGET', key('session', id), 'lease'))
  return redis.call('HGETALL', key('session', id))
end

-- Return up to *limit* sessions whose deadline has passed, earliest first: open sessions, or all other ones. Return an
-- empty list while the store is rebuilt, because its deadlines are uncertain.
local function passed(limit, is_open)
  local found, seen = {}, 0
  while is_whole() and #found < limit do
    local ids = redis.call('ZRANGEBYSCORE', key('deadlines'), '-inf', whole(now), 'LIMIT', seen, limit)
    for _, id in ipairs(ids) do
      local state = redis.call('HGET', key('session', id), 'state')
      if not state then
        -- Another client of Redis deleted the session's key. Its deadline must not come up forever.
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

-- Return true if *reason* means that the trainer ended the session. Such a session is unknown from then on.
local function is_trainers(reason)
  return reason == 'deleted' or reason == 'cancelled'
end

-- Remove a live session, and return its owner (false: unknown). Keep *reason* for *kept_s*, unless the trainer ended the
-- session or never received it (false).
local function forget(id, lease, reason, kept_s)
  local owner, environment = settled(id)
  if owner then
    disown(environment, owner, id)
  end
  redis.call('ZREM', key('deadlines'), id)
  local result = redis.call('HGET', key('session', id), 'result') or ''
  redis.call('DEL', key('session', id))
  if reason and not is_trainers(reason) then
    redis.call('HSET', key('session', id), 'state', 'closed', 'lease', lease, 'reason', reason, 'result', result)
    redis.call('PEXPIRE', key('session', id), whole(math.ceil(tonumber(kept_s) * 1000)))
  end
  return owner
end

-- Workers, and rebuilding -------------------------------------------------------------------------------------------

-- The fields of a worker, in the order of scripts' arguments and of load.lua's answer.
local WORKER = {'id', 'environment', 'digest', 'slots', 'max_uses', 'address', 'state'}

-- Register a worker with the fields *values*. Return its rank.
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

-- Make *worker* (its state, environment and rank) ready with *slots*, grant them to waiting openings, and close the
-- circuit breaker of its environment.
local function make_ready(id, worker, slots)
  redis.call('HSET', key('worker', id), 'state', 'ready', 'slots', slots, 'idle_ms', whole(now))
  list_free(id, worker[2], worker[3], redis.call('SCARD', key('held', id)), tonumber(slots))
  redis.call('HDEL', key('breakers'), worker[2])
  serve(worker[2])
  return 1
end

-- The fields of a session, in the order of the arguments of adopt.lua and restore.lua.
local SESSION = {'id', 'name', 'owner', 'lease', 'fingerprint', 'idle_s', 'task', 'episode', 'policy', 'handle',
  'scorer', 'worker', 'address'}

-- Read *count* sessions from ARGV, from index *at* on.
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

-- Register *session*, which a replica or worker serves and this store lacks, as open, and count it as a use.
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
    'episode', session.episode, 'policy', session.policy, 'handle', session.handle, 'scorer', session.scorer,
    'worker', worker, 'address', has[2] ~= '' and has[2] or session.address, 'state', 'open')
  redis.call('ZADD', key('deadlines'), after(session.idle_s), id)
  own(has[1], session.owner, id)
  if redis.call('SADD', key('held', worker), id) == 1 then
    redis.call('HINCRBY', key('worker', worker), 'uses', 1)
  end
end

-- Update the state and the free slots of a worker after take_in added sessions.
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

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

-- Leading and wholeness ---------------------------------------------------------------------------------------------

-- Answers of scripts that change nothing; redis_link.py makes errors of ours of them.
local NOT_LEADING = {err = 'NOTLEADING another replica leads'}
local REBUILDING = {err = 'REBUILDING the store is being rebuilt'}

-- Whether the caller led once and does not by now: another one does, or the data in which it began to lead is gone. What
-- it decides on may be of before that: an emptied store has no workers, though they run. Its fence is the last argument
-- of every script that asks this; 0: it acts for itself, whoever leads.
local function fenced()
  local fence = tonumber(ARGV[#ARGV])
  return fence > 0 and fence ~= tonumber(redis.call('GET', key('fence')) or '0')
end

-- The run of this server: another one after each restart, and another server has another.
local function run()
  return string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
end

-- Whether the store holds everything: it was said to be whole, of this very run of this very server. What a restarted
-- server loaded, or one that took over had copied, may be older than what replicas know. Asked at most once in a
-- script, and only where it matters: INFO takes 10 us.
local known_whole
local function is_whole()
  if known_whole == nil then
    local marked = redis.call('GET', key('whole'))
    known_whole = marked ~= false and marked == run()
  end
  return known_whole
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
  'episode', 'policy', 'group', 'group_size', 'together_s'}

local GROUP, GROUP_SIZE, TOGETHER_S = 13, 14, 15

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

-- How long a replica has to learn that its ticket was dropped (s).
local DROPPED_KEPT_S = 60

-- Take a ticket whose time has passed out of the queue and tell its replica, if that lives, to look; that it was not lost
-- is kept.
local function drop(environment, id, owner)
  local ticket = redis.call('HMGET', key('ticket', id), 'replica', 'lease', 'owner')
  redis.call('ZREM', key('waits', environment), id)
  if owner or ticket[3] then
    leave(environment, id, owner or ticket[3])
  end
  if ticket[1] then
    redis.call('SET', key('failed', ticket[2]), 'late', 'EX', DROPPED_KEPT_S)
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

-- Let all that wait fail with *message*; it says to come again in *left_ms*, and is kept for their replicas to fetch for
-- *kept_s*. Returns how many.
local function fail_all(environment, message, left_ms, kept_s)
  sweep(environment)
  local ids = redis.call('ZRANGE', key('waits', environment), 0, -1)
  local number = #ids > 0 and whole(redis.call('INCR', key('number')))
  for _, id in ipairs(ids) do
    local ticket = redis.call('HMGET', key('ticket', id), 'replica', 'lease', 'owner', 'group')
    redis.call('DEL', key('ticket', id))
    if ticket[4] and ticket[4] ~= '' then
      leave_group(environment, ticket[4], id)
    end
    if ticket[1] then
      redis.call('SET', key('failed', ticket[2]), number .. ' ' .. whole(left_ms), 'EX', kept_s)
      redis.call('DEL', line(environment, ticket[3]))
      wake(ticket[1], ticket[2])
    end
  end
  if number then
    -- Once for all of them: a thousand openings may fail with one worker's log.
    redis.call('SET', key('cause', number), message, 'EX', kept_s)
  end
  redis.call('DEL', key('waits', environment), key('queue', environment))
  end_queue(environment)
  return #ids
end

-- Admission ---------------------------------------------------------------------------------------------------------

-- The pace is the mean time between two slots that went to openings that waited (ms). Both as in admission.py.
local PACE_WEIGHT = 0.2
local PACE_KEPT_S = 600

local function note_pace(environment, interval_ms, slots)
  interval_ms = math.min(math.max(interval_ms, 0), PACE_KEPT_S * 1000)
  local mean_ms = tonumber(redis.call('GET', key('pace', environment)) or interval_ms)
  mean_ms = interval_ms + (mean_ms - interval_ms) * (1 - PACE_WEIGHT) ^ slots
  redis.call('SET', key('pace', environment), string.format('%.3f', mean_ms), 'EX', PACE_KEPT_S)
end

-- What an estimate is made of: the place that *id* has at most (false: that one more opening of *owner* would have), as
-- owners take turns; and the pace ('': not known).
local function outlook(environment, owner, id)
  local all, owners = redis.call('ZCARD', key('waits', environment)), redis.call('ZCARD', key('queue', environment))
  local own = redis.call('ZCARD', line(environment, owner))
  local rank = id and redis.call('ZRANK', line(environment, owner), id)
  if rank then
    own = rank + 1
  else
    all, owners, own = all + 1, own == 0 and owners + 1 or owners, own + 1
  end
  return math.min(all, own * owners), redis.call('GET', key('pace', environment)) or ''
end

-- How much longer the breaker is open (ms), and its message; nil if it is not. One whose time is over is forgotten.
local function broken(environment)
  local kept = redis.call('HGET', key('breakers'), environment)
  if not kept then
    return nil
  end
  local space = string.find(kept, ' ', 1, true)
  local left_ms = tonumber(string.sub(kept, 1, space - 1)) - now
  if left_ms <= 0 then
    redis.call('HDEL', key('breakers'), environment)
    return nil
  end
  return left_ms, string.sub(kept, space + 1)
end

local function close_breaker(environment)
  redis.call('HDEL', key('breakers'), environment)
end

-- Slots -------------------------------------------------------------------------------------------------------------

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
    'task', opening[9], 'episode', opening[11], 'policy', opening[12] or '', 'worker', worker, 'address', has[3],
    'state', 'opening', 'replica', opening[10], 'setup_s', opening[8])
  redis.call('HSET', key('openings', opening[10]), id, opening[5])
  redis.call('ZADD', key('deadlines'), after(opening[8]), id)
  redis.call('SADD', key('held', worker), id)
  if not is_whole() then
    -- A hand-over while the store is rebuilt: adopt.lua must not take it for one of an older state.
    redis.call('HSET', key('session', id), 'run', run())
  end
  local uses = redis.call('HINCRBY', key('worker', worker), 'uses', 1)
  local max_uses = tonumber(has[2])
  if max_uses > 0 and uses >= max_uses then
    drain(worker, environment, rank)
  else
    list_free(worker, environment, rank, redis.call('SCARD', key('held', worker)), tonumber(has[1]))
  end
end

-- Groups ------------------------------------------------------------------------------------------------------------

-- Openings of one group begin together: the first of them takes slots for all, or waits until there are as many. Those
-- that others have not come for yet are reserved: free, but nobody else's. How long slots are kept for a group that there
-- are not enough of, and then for those that have not come, is the same time, which their openings say.

-- Both as in admission.py.
local GROUP_KEPT_MS = 600000
local LAST_CALL_MS = 3000

-- Slots of *environment* that no session holds, at most *enough*.
local function count_free(environment, enough)
  local count = 0
  local free = redis.call('ZRANGE', key('free', environment), 0, enough - 1, 'WITHSCORES')
  for i = 1, #free, 2 do
    local has = redis.call('HMGET', key('worker', string.sub(free[i], RANK_DIGITS + 1)), 'slots', 'max_uses', 'uses')
    if has[1] then
      local room = tonumber(has[1]) - tonumber(free[i + 1])
      if has[2] ~= '0' then
        room = math.min(room, tonumber(has[2]) - tonumber(has[3]))
      end
      count = count + room
    end
    if count >= enough then
      return enough
    end
  end
  return count
end

-- How many slots are reserved for *group*, or for all ('total').
local function reserved_for(environment, group)
  return tonumber(redis.call('HGET', key('reserve', environment), group) or '0')
end

-- Free slots of *environment* that are reserved for no group, at most *enough*.
local function count_available(environment, enough)
  local reserved = reserved_for(environment, 'total')
  return math.max(0, count_free(environment, enough + reserved) - reserved)
end

local function is_available(environment)
  return count_available(environment, 1) > 0
end

-- Reserve *count* slots for a group, for *together_s* from its first one on; those that it had are let go.
local function reserve(environment, group, count, together_s)
  local had = reserved_for(environment, group)
  if count > 0 then
    redis.call('HSET', key('reserve', environment), group, whole(count))
    redis.call('ZADD', key('lapse', environment), 'NX', after(together_s), group)
    redis.call('SADD', key('reserving'), environment)
  elseif had > 0 then
    redis.call('HDEL', key('reserve', environment), group)
    redis.call('ZREM', key('lapse', environment), group)
  end
  if count ~= had and redis.call('HINCRBY', key('reserve', environment), 'total', whole(count - had)) <= 0 then
    redis.call('DEL', key('reserve', environment), key('lapse', environment))
    redis.call('SREM', key('reserving'), environment)
  end
end

-- Note that a group's time is over: whoever comes from now on is by itself.
local function part(group)
  redis.call('HSET', key('group', group), 'parted', 1)
  redis.call('PEXPIRE', key('group', group), GROUP_KEPT_MS)
end

-- Let go what was reserved for those that did not come in time.
local function let_go(environment)
  for _, group in ipairs(redis.call('ZRANGEBYSCORE', key('lapse', environment), '-inf', whole(now))) do
    reserve(environment, group, 0)
    part(group)
  end
end

-- How many of the group of *opening* have no slot yet, by what its size says: at least itself.
local function wanted(opening)
  local known = redis.call('HMGET', key('group', opening[GROUP]), 'granted', 'parted')
  return known[2] and 1 or math.max(1, tonumber(opening[GROUP_SIZE]) - tonumber(known[1] or '0'))
end

-- How many of the groups that wait for *environment* have not come yet.
local function count_to_come(environment)
  local count = 0
  for _, group in ipairs(redis.call('SMEMBERS', key('groups', environment))) do
    local ids = redis.call('ZRANGE', members(group), 0, -1)
    local ticket = ids[1] and redis.call('HMGET', key('ticket', ids[1]), unpack(OPENING)) or {}
    if ticket[1] then
      count = count + math.max(0, wanted(ticket) - #ids)
    end
  end
  return count
end

-- Grant *opening*, one of a group, a slot of the worker of *rank*; no more is reserved than can still come.
local function grant_member(opening, rank)
  local environment, group = opening[4], opening[GROUP]
  local granted = redis.call('HINCRBY', key('group', group), 'granted', 1)
  redis.call('PEXPIRE', key('group', group), GROUP_KEPT_MS)
  local left = math.max(0, tonumber(opening[GROUP_SIZE]) - granted)
  if reserved_for(environment, group) > left then
    reserve(environment, group, left, opening[TOGETHER_S])
  end
  grant(opening, rank)
end

-- The openings of a group that wait and may be granted a slot, *most* of them; the others are dropped.
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

-- Whether a group that waits at the head has waited long enough for slots that others could have had.
local function is_impatient(opening, least_ms)
  if least_ms <= LAST_CALL_MS then
    return true
  end
  redis.call('HSETNX', key('group', opening[GROUP]), 'kept_ms', whole(now))
  redis.call('PEXPIRE', key('group', opening[GROUP]), GROUP_KEPT_MS)
  local kept_ms = tonumber(redis.call('HGET', key('group', opening[GROUP]), 'kept_ms'))
  return now - kept_ms >= tonumber(opening[TOGETHER_S]) * 1000
end

-- Serve the group of *opening*, which is first in the queue: all of it at once, or as many as there are slots for, once
-- it has waited long enough for more. Returns how many were granted a slot; 0: it goes on waiting.
local function serve_group(opening, owner, round)
  local environment, group = opening[4], opening[GROUP]
  local need = wanted(opening)
  local found, least_ms = waiting_of(environment, group, owner, need)
  local available = count_available(environment, need)
  if available == 0 or (available < need and not is_impatient(opening, least_ms)) then
    return 0
  end
  if available < need then
    part(group)
  end
  local count = math.min(#found, available)
  for i = 1, count do
    leave(environment, found[i][1], owner)
    grant_member(found[i], first(key('free', environment)))
    wake(found[i][10], found[i][5])
  end
  if available == need and need > count then
    reserve(environment, group, need - count, opening[TOGETHER_S])
  end
  -- Each slot is a turn of its owner.
  local head = redis.call('ZRANGE', line(environment, owner), 0, 0, 'WITHSCORES')
  if head[1] then
    redis.call('ZADD', key('queue', environment), round + count, listed(head[2], owner))
  end
  return count
end

-- Give free slots to those that wait, owner by owner; a ticket whose time has passed, or whose replica is gone, is
-- skipped. While a group that is first waits for more slots, those behind it wait as well.
local function serve(environment)
  local served, since_ms = 0, redis.call('HGET', key('round', environment), 'at_ms')
  while true do
    local rank = first(key('free', environment))
    local turn = rank and redis.call('ZRANGE', key('queue', environment), 0, 0, 'WITHSCORES') or {}
    if not turn[1] or not is_whole() then
      break -- until it is whole: a slot may seem free only because its session was lost
    end
    local owner, round = string.sub(turn[1], RANK_DIGITS + 1), tonumber(turn[2])
    local id = first(line(environment, owner))
    local ticket = id and redis.call('HMGET', key('ticket', id), unpack(OPENING)) or {}
    local until_ms = id and redis.call('ZSCORE', key('waits', environment), id)
    local is_late = until_ms and tonumber(until_ms) <= now or is_gone(ticket[10])
    if ticket[1] and until_ms and not (is_late and is_believed()) then
      local count = 0
      if ticket[GROUP] and ticket[GROUP] ~= '' then
        count = serve_group(ticket, owner, round)
      elseif is_available(environment) then
        leave(environment, id, owner, round + 1)
        grant(ticket, rank)
        wake(ticket[10], ticket[5])
        count = 1
      end
      if count == 0 then
        break
      end
      if redis.call('EXISTS', key('round', environment)) == 1 then
        redis.call('HSET', key('round', environment), 'number', whole(round), 'at_ms', whole(now))
      end
      served = served + count
    elseif id then
      drop(environment, id, owner)
    else
      -- Somebody else deleted the line.
      redis.call('ZREM', key('queue', environment), turn[1])
      end_queue(environment)
    end
  end
  if served > 0 and since_ms then
    note_pace(environment, (now - tonumber(since_ms)) / served, served)
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
  settled(id)
  redis.call('HSET', key('session', id), 'state', 'closing', 'reason', reason)
  redis.call('ZADD', key('deadlines'), after(closing_s), id)
  publish_ended(id, redis.call('HGET', key('session', id), 'lease'))
end

-- Drop a live session. Why it ended is remembered for *kept_s*, unless its trainer did it ('deleted') or never knew
-- of it (false).
local function forget(id, lease, reason, kept_s)
  settled(id)
  redis.call('ZREM', key('deadlines'), id)
  redis.call('DEL', key('session', id))
  if reason and reason ~= 'deleted' then
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

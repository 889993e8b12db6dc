-- Become or stay the leader of the control loop, and detect jumps of Redis's clock.
-- ARGV: replica, time of the lead (s), name of the caller's clock, its reading (ms, monotonic), the smallest difference
-- that is a jump (ms), time for which clock readings are kept (ms), the last fence that the caller received, the owner
-- for which the caller claimed the store ('' for none)
-- Returns the caller's fence (0 if another replica leads), the last issued fence, and 1 if the store is whole else 0.

-- An emptied store has no owner until a replica calls this. After a takeover, only replicas of the new owner may lead:
-- other replicas do not see its workers, and would treat them as lost.
if ARGV[8] ~= '' then
  redis.call('SET', key('owner'), ARGV[8], 'NX')
  if redis.call('GET', key('owner')) ~= ARGV[8] then
    return OTHERS
  end
end

-- Redis has only the wall clock. Between two calls of one caller, it should advance as far as the caller's monotonic
-- clock. The difference is subtracted from every later reading. The readings of all replicas count, not only those of
-- the leader, because a jump also ends the leader's lead.

-- Correct deadlines that were set between the jump and now. After a jump forward, a deadline must not be later than the
-- session's idle time, or the time for its opening, from now. After a jump backward, entries that seem late may not be
-- late, and get the lost time added.
local function redate(jump)
  local lowest, highest = jump > 0 and whole(now + jump) or '-inf', jump > 0 and '+inf' or whole(now)
  local dated = redis.call('ZRANGEBYSCORE', key('deadlines'), lowest, highest, 'WITHSCORES')
  for i = 1, #dated, 2 do
    local session = redis.call('HMGET', key('session', dated[i]), 'state', 'idle_s', 'setup_s')
    local span_s = session[1] == 'open' and session[2] or session[1] == 'opening' and session[3]
    if span_s then
      local latest = now + math.ceil(tonumber(span_s) * 1000)
      local meant = math.min(tonumber(dated[i + 1]) - math.min(jump, 0), latest)
      redis.call('ZADD', key('deadlines'), whole(meant), dated[i])
    end
  end
  for _, environment in ipairs(jump < 0 and redis.call('SMEMBERS', key('queues')) or {}) do
    local waits = redis.call('ZRANGEBYSCORE', key('waits', environment), '-inf', whole(now), 'WITHSCORES')
    for i = 1, #waits, 2 do
      redis.call('ZADD', key('waits', environment), whole(tonumber(waits[i + 1]) - jump), waits[i])
    end
  end
end

local clock, caller_ms, kept_ms = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[6])
local reading = redis.call('HGET', key('paced'), clock)
if reading then
  local before_ms, before_now = string.match(reading, '^(%-?%d+) (%-?%d+)$')
  local jump = (now - tonumber(before_now)) - (caller_ms - tonumber(before_ms))
  if math.abs(jump) >= tonumber(ARGV[5]) then
    redis.call('INCRBY', key('jumped'), whole(jump))
    now = now - jump
    redate(jump)
  end
else
  -- A new process calls: delete old readings of ended processes.
  local readings = redis.call('HGETALL', key('paced'))
  for i = 1, #readings, 2 do
    if tonumber(string.match(readings[i + 1], ' (%-?%d+)$')) < now - kept_ms then
      redis.call('HDEL', key('paced'), readings[i])
    end
  end
end
redis.call('HSET', key('paced'), clock, whole(caller_ms) .. ' ' .. whole(now))

-- The opening sessions of a replica that is gone become due, because the replica cannot finish them. The replica stays
-- recorded as gone for as long as its tickets may exist.
redis.call('HSET', key('replicas'), ARGV[1], whole(now))
redis.call('SET', key('heard'), whole(now))
local this_run = run()
if string.match(redis.call('GET', key('heard_run')) or '', '^%x+') ~= this_run then
  redis.call('SET', key('heard_run'), this_run .. ' ' .. whole(now))
end
local heard = redis.call('HGETALL', key('replicas'))
for i = 1, #heard, 2 do
  local heard_ms = tonumber(heard[i + 1])
  if is_gone(heard[i]) then
    local openings = redis.call('HGETALL', key('openings', heard[i]))
    for n = 1, #openings, 2 do
      local session = redis.call('HMGET', key('session', openings[n]), 'state', 'lease')
      if session[1] == 'opening' and session[2] == openings[n + 1] then
        redis.call('ZADD', key('deadlines'), whole(now), openings[n])
      end
    end
    redis.call('DEL', key('openings', heard[i]))
    if heard_ms < now - kept_ms then
      redis.call('HDEL', key('replicas'), heard[i])
    end
  end
end

-- Fences must also grow across a data loss, because an earlier leader may still act with its fence. So a new fence is
-- at least the wall clock (ms), which survives the data. It is also above the last fence that the caller received,
-- which survives a clock that was set back.
local last = math.max(tonumber(redis.call('GET', key('fence')) or '0'), tonumber(ARGV[7]))
local fence, led_in, leader = string.match(redis.call('GET', key('leader')) or '', '^(%d+) (%x+) (.*)$')
if led_in ~= this_run then
  -- No replica leads, or the state is from before a restart and its leader may have successors.
  fence = math.max(last + 1, tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
  last = fence
  redis.call('SET', key('fence'), whole(fence))
elseif leader ~= ARGV[1] then
  return {0, last, is_whole() and 1 or 0}
end
redis.call('SET', key('leader'), whole(fence) .. ' ' .. this_run .. ' ' .. ARGV[1],
  'PX', whole(math.ceil(tonumber(ARGV[2]) * 1000)))
return {tonumber(fence), last, is_whole() and 1 or 0}

-- Admission ---------------------------------------------------------------------------------------------------------

-- The pace is the mean time (ms) between two slots that went to waiting openings. Both values as in retry_after.py.
local PACE_WEIGHT = 0.2
local PACE_KEPT_S = 600

local function note_pace(environment, interval_ms, slots)
  interval_ms = math.min(math.max(interval_ms, 0), PACE_KEPT_S * 1000)
  local mean_ms = tonumber(redis.call('GET', key('pace', environment)) or interval_ms)
  mean_ms = interval_ms + (mean_ms - interval_ms) * (1 - PACE_WEIGHT) ^ slots
  redis.call('SET', key('pace', environment), string.format('%.3f', mean_ms), 'EX', PACE_KEPT_S)
end

-- Return the input of the error of an opening without a slot: the latest place in the service order, as owners take
-- turns, the pace ('': unknown), and the sessions that *owner* holds, in all and in *environment*. The place is that of
-- *id*, or, if *id* is false, that of one more opening of *owner*.
local function outlook(environment, owner, id)
  local all, owners = redis.call('ZCARD', key('waits', environment)), redis.call('ZCARD', key('queue', environment))
  local own = redis.call('ZCARD', line(environment, owner))
  local rank = id and redis.call('ZRANK', line(environment, owner), id)
  if rank then
    own = rank + 1
  else
    all, owners, own = all + 1, own == 0 and owners + 1 or owners, own + 1
  end
  return math.min(all, own * owners), redis.call('GET', key('pace', environment)) or '', count_owned(environment, owner)
end

-- Return the time (ms) for which the circuit breaker stays open, and its message; nil if it is closed. An expired
-- breaker is deleted.
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

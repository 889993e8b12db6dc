-- Serving waiting openings -----------------------------------------------------------------------------------------

-- Grant free slots to waiting openings, owner by owner. Skip a ticket whose time has passed, or whose replica is gone.
-- A group that waits for more slots blocks the queue once half of it has come; before, it is passed over. So is an owner
-- at its limit. Return the number of granted slots.
local function serve(environment)
  local served, since_ms = 0, redis.call('HGET', key('round', environment), 'at_ms')
  local passed_over = 0
  while true do
    local rank = first(key('free', environment))
    local turn = rank and redis.call('ZRANGE', key('queue', environment), passed_over, passed_over, 'WITHSCORES') or {}
    if not turn[1] or not is_whole() then
      break -- until it is whole: a slot may seem free only because its session was lost
    end
    local owner = string.sub(turn[1], RANK_DIGITS + 1)
    -- From the present round on: an owner that was passed over at its limit does not make up for these rounds.
    local round = math.max(tonumber(turn[2]), tonumber(redis.call('HGET', key('round', environment), 'number') or '0'))
    local id = first(line(environment, owner))
    local ticket = id and redis.call('HMGET', key('ticket', id), unpack(OPENING)) or {}
    local until_ms = id and redis.call('ZSCORE', key('waits', environment), id)
    local is_late = until_ms and tonumber(until_ms) <= now or is_gone(ticket[10])
    if ticket[1] and until_ms and not (is_late and is_believed()) then
      local count, is_passed_over = 0, false
      if ticket[GROUP] and ticket[GROUP] ~= '' then
        count, is_passed_over = serve_group(ticket, owner, round)
      elseif room_of(ticket) < 1 then
        is_passed_over = true
      elseif count_available(environment, 1) > 0 then
        leave(environment, id, owner, true, round + 1)
        grant(ticket, choose(environment))
        wake(ticket[10], ticket[5])
        count = 1
      end
      if count == 0 and not is_passed_over then
        break
      end
      if count == 0 then
        passed_over = passed_over + 1
      else
        passed_over = 0
        if redis.call('EXISTS', key('round', environment)) == 1 then
          redis.call('HSET', key('round', environment), 'number', whole(round), 'at_ms', whole(now))
        end
        served = served + count
      end
    elseif id then
      drop(environment, id, owner)
    else
      -- Another client of Redis deleted the line.
      redis.call('ZREM', key('queue', environment), turn[1])
      end_queue(environment)
    end
  end
  if served > 0 and since_ms then
    note_pace(environment, (now - tonumber(since_ms)) / served, served)
  end
  return served
end

-- Grant free slots to waiting openings of *owners* (a set), whose sessions ended, in order of arrival. In any
-- environment, they may have waited only for the limit of their owner.
local function serve_owners(owners)
  local firsts = {}
  for _, environment in ipairs(redis.call('SMEMBERS', key('queues'))) do
    local least = math.huge
    for owner in pairs(owners) do
      local head = redis.call('ZRANGE', line(environment, owner), 0, 0, 'WITHSCORES')
      least = math.min(least, tonumber(head[2] or math.huge))
    end
    if least < math.huge then
      firsts[#firsts + 1] = {least, environment}
    end
  end
  table.sort(firsts, function(a, b) return a[1] < b[1] end)
  for _, entry in ipairs(firsts) do
    serve(entry[2])
  end
end

-- Return the names of the environments with a queue, in order, so that scripts serve them in the same order each time.
local function list_queues()
  local queues = redis.call('SMEMBERS', key('queues'))
  table.sort(queues)
  return queues
end

-- Release the slot of session *id* of *owner* (false: unknown), and grant it to the next waiting opening.
local function free(worker, environment, id, owner)
  redis.call('SREM', key('held', worker), id)
  local has = redis.call('HMGET', key('worker', worker), 'state', 'rank', 'slots')
  local used = redis.call('SCARD', key('held', worker))
  if used == 0 then
    redis.call('HSET', key('worker', worker), 'idle_ms', whole(now))
  end
  if has[1] == 'ready' then
    list_free(worker, environment, has[2], used, tonumber(has[3]))
  elseif used == 0 then
    publish_wanted(environment)
  end
  if redis.call('EXISTS', key('queues')) == 1 then
    serve_owners(owner and {[owner] = true} or {})
    serve(environment)
  end
end

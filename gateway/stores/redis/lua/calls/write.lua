-- Record changes of a replica's calls, and that the replica lives.
-- ARGV: replica, lifetime of its sign (s), maximum number of calls of a session, maximum bytes of a session, maximum
--   bytes of all sessions, then for each change: kind, session, lease, task id, the key's hash ('-' for none), digest
--   ('-' for none), time for which it is kept (s), outcome. A change of kind 'tallied' has other values in three
--   places: the run in which the count was first reported ('-' for none) instead of the hash, the time since the last
--   call ended (ms; '-' for none) instead of the digest, and the count instead of the outcome.
-- Returns the run of this server.

local replica = ARGV[1]
local most, most_bytes, total_bytes = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
sign(replica, ARGV[2])
sweep()

local function end_call(place, task, kind, head, keep_s, outcome)
  drop_outcome(place, task)
  local held = tonumber(redis.call('GET', key('call_bytes')) or '0')
  if kind == 'done' and held + string.len(outcome) > total_bytes then
    kind = 'dropped'
  end
  if kind == 'dropped' and head.hashed == '-' then
    remove(place, task, head)
    return
  end
  head.state = kind
  set_head(place, task, head)
  if kind == 'done' then
    redis.call('HSET', key('calls', place), 'out:' .. task, outcome)
    count(place, string.len(outcome))
  end
  keep(place, task, keep_s)
end

local this_run = run()

-- Store the count that this replica reports of a session. If a count that was reported earlier in this run is missing,
-- it was lost or the session has ended. Then it is not stored again, so that the replica that adds up the counts
-- detects the gap.
local function keep_tally(place, told_in, age, keep_s, count)
  local tallies = key('call_tallies', place)
  local known = redis.call('HGET', tallies, replica)
  if told_in ~= '-' and (told_in ~= this_run or not known) then
    return
  end
  local kept_in, number, version = this_run, string.match(count, '^(%S+) (%S+)')
  if known then
    local known_in, known_number, known_version = string.match(known, '^(%S+) %S+ (%S+) (%S+)')
    if known_number == number and tonumber(known_version) > tonumber(version) then
      return
    end
    if known_in ~= this_run or known_number ~= number then
      kept_in = '-' -- of no run: a part of it is missing
    end
  end
  local ended = age == '-' and '-' or whole(now - tonumber(age))
  redis.call('HSET', tallies, replica, kept_in .. ' ' .. ended .. ' ' .. count)
  redis.call('PEXPIRE', tallies, whole(math.ceil(tonumber(keep_s) * 1000)))
end

for i = 6, #ARGV, 8 do
  local kind, place, task, keep_s = ARGV[i], ARGV[i + 1] .. ':' .. ARGV[i + 2], ARGV[i + 3], ARGV[i + 6]
  local head = {state = 'running', digest = ARGV[i + 5], hashed = ARGV[i + 4], replica = replica}
  if kind == 'forgotten' then
    forget_all(place)
    redis.call('DEL', key('call_tallies', place))
  elseif kind == 'tallied' then
    keep_tally(place, ARGV[i + 4], ARGV[i + 5], keep_s, ARGV[i + 7])
  elseif kind == 'running' then
    if not head_of(place, task) then
      set_head(place, task, head)
      keep(place, task, keep_s)
    end
  else
    if kind == 'undone' then
      remove(place, task, head_of(place, task))
    else
      end_call(place, task, kind, head, keep_s, ARGV[i + 7])
    end
  end
  if kind ~= 'forgotten' and kind ~= 'tallied' then
    tidy(place, most, most_bytes)
  end
end
return this_run

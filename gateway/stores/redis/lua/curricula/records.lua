-- List the records of an environment that changed since a version.
-- ARGV: environment, the known version ('' for none), maximum number of changes, bytes after which no further change is
--   listed
-- Returns {version after these changes, 1 if they start from the beginning else 0, 1 if they are the last else 0,
--   {task, its record or '' if it was removed, ...}}.

local environment, limit, left = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])
local sums = redis.call('HMGET', key('curriculum_changes', environment), 'epoch', 'number', 'floor')
if not sums[1] then
  return {'', 1, 1, {}}
end
-- The epoch includes the environment, because one note may start several environments. It includes the run, because the
-- data after a restart or a failover may be older than the readers' data.
local epoch, number = sums[1] .. '-' .. environment .. '-' .. run(), tonumber(sums[2])
-- A replica that reads from the beginning reads pages. It does not need removals before its start, which is *base*.
local known_epoch, known, base = string.match(ARGV[2], '^(.*):(%d+):(%d+)$')
local from_beginning = known_epoch ~= epoch or tonumber(base) < tonumber(sums[3] or '0')
if from_beginning then
  known, base = 0, number
end
known, base = tonumber(known), tonumber(base)

local function after_number(kind, number)
  return redis.call('ZRANGEBYSCORE', key(kind, environment), '(' .. whole(number), '+inf', 'WITHSCORES',
    'LIMIT', 0, limit)
end

local live, gone = after_number('curriculum_changed', known), after_number('curriculum_gone', math.max(known, base))
local l, g, bytes, listed = 1, 1, 0, {}
while (live[l] or gone[g]) and #listed < 2 * limit and bytes <= left do
  local task, kept
  if not gone[g] or (live[l] and tonumber(live[l + 1]) < tonumber(gone[g + 1])) then
    task, known, l = live[l], tonumber(live[l + 1]), l + 2
    kept = redis.call('HGET', key('curriculum_records', environment), task)
  else
    task, known, g = gone[g], tonumber(gone[g + 1]), g + 2
    kept = ''
  end
  listed[#listed + 1] = task
  listed[#listed + 1] = kept
  bytes = bytes + string.len(task) + string.len(kept)
end
local is_last = not live[l] and not gone[g] and #live < 2 * limit and #gone < 2 * limit
if is_last then
  known = number
end
return {epoch .. ':' .. whole(known) .. ':' .. whole(math.max(known, base)), from_beginning and 1 or 0,
  is_last and 1 or 0, listed}

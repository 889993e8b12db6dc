-- Store tasks, all or none of them.
-- ARGV: whether known tasks may be replaced ('1' or ''), maximum number of tasks and of splits of an environment,
--   maximum bytes of all tasks, the stamp of their bundle (key, environment, split, time, digest; empty: unsigned),
--   then environment, id, split, signer and body of each task. Each id occurs once.
-- Returns {'kept', {place, ...}}, {'exists', environment, id}, {'tasks', environment}, {'splits', environment},
--   {'bytes'}, {'older', time of the bundle that bars this one} or {'elsewhere', environment, id, its split}.

local bundle = {key = ARGV[5], environment = ARGV[6], split = ARGV[7], made_at = ARGV[8], digest = ARGV[9]}
local bundles = key('task_bundles', bundle.key)

local function may_share(own, other)
  return own == '' or other == '' or own == other
end

-- Return the latest time of the key's accepted bundles that bar this bundle (as BundleStamp.is_barred_by), or ''.
local function barred_by()
  local newest, accepted = '', redis.call('HGETALL', bundles)
  for i = 1, #accepted, 2 do
    local environment, split = string.match(accepted[i], '^(%S*) (%S*)$')
    local made_at, digest = string.match(accepted[i + 1], '^(%S+) (%S+)$')
    if may_share(bundle.environment, environment) and may_share(bundle.split, split)
      and (made_at > bundle.made_at or (made_at == bundle.made_at and digest ~= bundle.digest))
      and made_at > newest then
      newest = made_at
    end
  end
  return newest
end

if bundle.key ~= '' then
  local newest = barred_by()
  if newest ~= '' then
    return {'older', newest}
  end
  for i = 10, bundle.split ~= '' and #ARGV or 0, 5 do
    local had = redis.call('HGET', key('tasks'), ARGV[i] .. ' ' .. ARGV[i + 1])
    local split = had and string.match(had, '^(%S+) ')
    if split and split ~= bundle.split then
      return {'elsewhere', ARGV[i], ARGV[i + 1], split}
    end
  end
end

local max_tasks, max_splits, max_bytes = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local sums, counted = key('task_sums'), {}

local function sum(field, by)
  if not counted[field] then
    counted[field] = tonumber(redis.call('HGET', sums, field) or '0')
  end
  counted[field] = counted[field] + by
  return counted[field]
end

-- Read the current version of each task, and compute the new sums.
local before, given = {}, {}
for i = 10, #ARGV, 5 do
  local environment, split = ARGV[i], ARGV[i + 2]
  local name = environment .. ' ' .. ARGV[i + 1]
  before[i] = redis.call('HGET', key('tasks'), name)
  if before[i] then
    if ARGV[1] ~= '1' then
      return {'exists', environment, ARGV[i + 1]}
    end
    sum('bytes', -(string.len(before[i]) - string.find(before[i], '\n', 1, true)))
  elseif sum('count:' .. environment, 1) > max_tasks then
    return {'tasks', environment}
  end
  sum('bytes', string.len(ARGV[i + 4]))
  local place = 'place:' .. environment .. ' ' .. split
  if sum(place, 0) == 0 and not given[place] then
    given[place] = true
    if sum('splits:' .. environment, 1) > max_splits then
      return {'splits', environment}
    end
  end
end
if sum('bytes', 0) > max_bytes then
  return {'bytes'}
end

local places = {}
local number = changes_begin()
for i = 10, #ARGV, 5 do
  local name, split, place = ARGV[i] .. ' ' .. ARGV[i + 1], ARGV[i + 2], nil
  if before[i] then
    local had, at = string.match(before[i], '^(%S+) (%d+) ')
    place = had == split and at
  elseif redis.call('ZSCORE', key('task_changes'), name) then
    sum('gone', -1)
  end
  if not place then
    place = whole(sum('place:' .. ARGV[i] .. ' ' .. split, 1) - 1)
  end
  number = number + 1
  redis.call('HSET', key('tasks'), name, split .. ' ' .. place .. ' ' .. ARGV[i + 3] .. '\n' .. ARGV[i + 4])
  redis.call('ZADD', key('task_changes'), whole(number), name)
  places[#places + 1] = place
end
for field, value in pairs(counted) do
  redis.call('HSET', sums, field, whole(value))
end
changes_end(number)
if bundle.key ~= '' then
  redis.call('HSET', bundles, bundle.environment .. ' ' .. bundle.split, bundle.made_at .. ' ' .. bundle.digest)
end
return {'kept', places}

-- List the tasks that changed since a version.
-- ARGV: the known version ('' for none), maximum number of changes, bytes after which no further change is listed
-- Returns {version after these changes, 1 if they start from the beginning else 0, 1 if they are the last else 0,
--   {environment and id, the stored task or '' if it was removed, ...}}.

local version = redis.call('GET', key('task_version'))
if not version then
  return {'', 1, 1, {}}
end
local epoch, number = string.match(version, '^(.*):(%d+)$')
-- A replica that reads from the beginning reads pages. It does not need removals before its start, which is *base*.
local known_epoch, known, base = string.match(ARGV[1], '^(.-):(%d+):(%d+)$')
if not base then
  known_epoch, known = string.match(ARGV[1], '^(.*):(%d+)$')
end
local floor = tonumber(redis.call('HGET', key('task_sums'), 'floor') or '0')
local from_beginning = known_epoch ~= epoch or tonumber(known) > tonumber(number) or tonumber(base or known) < floor
if from_beginning then
  known, base = '0', number
end

-- Return the version after a page that is not the last one.
local function version_at(reached)
  return epoch .. ':' .. reached .. (base and ':' .. base or '')
end

local limit, bytes, left = tonumber(ARGV[2]), 0, tonumber(ARGV[3])
local changes = redis.call('ZRANGEBYSCORE', key('task_changes'), '(' .. known, '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
local listed, reached = {}, known
for i = 1, #changes, 2 do
  if bytes > left then
    return {version_at(reached), from_beginning and 1 or 0, 0, listed}
  end
  local kept = redis.call('HGET', key('tasks'), changes[i])
  bytes = bytes + (kept and string.len(kept) or 0)
  listed[#listed + 1] = changes[i]
  listed[#listed + 1] = kept or ''
  reached = whole(changes[i + 1])
end
if #changes < 2 * limit then
  return {version, from_beginning and 1 or 0, 1, listed}
end
return {version_at(reached), from_beginning and 1 or 0, 0, listed}

-- List what changed since a version.
-- ARGV: the version that is known ('' for none), the most changes, the bytes after which no further change is listed
-- Returns {version that these lead to, 1 if these are from the beginning else 0, 1 if nothing follows else 0,
--   {environment and id, what is kept or '' if it went, ...}}.

local version = redis.call('GET', key('task_version'))
if not version then
  return {'', 1, 1, {}}
end
local epoch, number = string.match(version, '^(.*):(%d+)$')
-- Who reads from the beginning is told in pages; it need not know of what went before it began, which is *base*.
local known_epoch, known, base = string.match(ARGV[1], '^(.-):(%d+):(%d+)$')
if not base then
  known_epoch, known = string.match(ARGV[1], '^(.*):(%d+)$')
end
local floor = tonumber(redis.call('HGET', key('task_sums'), 'floor') or '0')
local from_beginning = known_epoch ~= epoch or tonumber(known) > tonumber(number) or tonumber(base or known) < floor
if from_beginning then
  known, base = '0', number
end

-- What a page leads to that is not the last one.
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

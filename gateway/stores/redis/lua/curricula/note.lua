-- Add outcomes to their tasks' records.
-- ARGV: time for which a lease is kept (s), maximum number of records of an environment, number of rewards that a
--   record keeps, maximum number of removed records whose names are kept, an epoch for environments without one, then
--   environment, task, reward, whether it finished (1 or 0), steps, seconds, policy and lease ('' for none) of each
--   outcome
-- Returns the number of outcomes that counted.

local told_ms = whole(math.ceil(tonumber(ARGV[1]) * 1000))
local max_records, recent_kept, gone_kept = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local seen_at, counted, books = exact(now / 1000), 0, {}

local function read(environment, task)
  local kept = redis.call('HGET', key('curriculum_records', environment), task)
  if not kept then
    return {attempts = 0, finished = 0, mean = 0, spread = 0, steps = 0, seconds = 0, recent = '', is_new = true}
  end
  local attempts, finished, mean, spread, steps, seconds, recent =
    string.match(kept, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+) %S+\n([^\n]*)\n')
  return {attempts = tonumber(attempts), finished = tonumber(finished), mean = tonumber(mean),
    spread = tonumber(spread), steps = tonumber(steps), seconds = tonumber(seconds), recent = recent}
end

local function add(record, reward, finished, steps, seconds, policy)
  -- The same steps in the same order as TaskRecord.after in core/curriculum.py, so that every digit is the same.
  local attempts = record.attempts + 1
  local delta = tonumber(reward) - record.mean
  local mean = record.mean + delta / attempts
  record.attempts = attempts
  record.finished = record.finished + tonumber(finished)
  record.mean = mean
  record.spread = record.spread + delta * (tonumber(reward) - mean)
  record.steps = record.steps + (tonumber(steps) - record.steps) / attempts
  record.seconds = record.seconds + (tonumber(seconds) - record.seconds) / attempts
  record.policy = policy
  record.recent = record.recent == '' and reward or record.recent .. ' ' .. reward
  local _, gaps = string.gsub(record.recent, ' ', ' ')
  for _ = recent_kept, gaps do
    record.recent = string.match(record.recent, ' (.*)$')
  end
end

local function write(environment, task, record)
  local head = {whole(record.attempts), whole(record.finished), exact(record.mean), exact(record.spread),
    exact(record.steps), exact(record.seconds), seen_at}
  redis.call('HSET', key('curriculum_records', environment), task,
    table.concat(head, ' ') .. '\n' .. record.recent .. '\n' .. record.policy)
  redis.call('ZADD', key('curriculum_changed', environment), whole(record.number), task)
  if record.is_new then
    redis.call('ZREM', key('curriculum_gone', environment), task)
  end
end

for i = 6, #ARGV, 8 do
  local environment, task, lease = ARGV[i], ARGV[i + 1], ARGV[i + 7]
  if lease == '' or redis.call('SET', key('curriculum_told', lease), '1', 'PX', told_ms, 'NX') then
    local book = books[environment]
    if not book then
      book = {number = changes_begin(environment, ARGV[5]), records = {}}
      books[environment] = book
    end
    local record = book.records[task] or read(environment, task)
    add(record, ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5], ARGV[i + 6])
    book.number = book.number + 1
    record.number = book.number
    book.records[task] = record
    counted = counted + 1
  end
end

for environment, book in pairs(books) do
  for task, record in pairs(book.records) do
    write(environment, task, record)
  end
  local changed = key('curriculum_changed', environment)
  local over = redis.call('ZCARD', changed) - max_records
  if over > 0 then
    book.number = remove_records(environment, redis.call('ZRANGE', changed, 0, over - 1), book.number, gone_kept)
  end
  changes_end(environment, book.number)
end
return counted

-- What all operations share; the loader puts the files of this folder before each, in the order in which it names them.
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

-- Answers of scripts that change nothing; client.py makes errors of ours of them.
local NOT_LEADING = {err = 'NOTLEADING another replica leads'}
local REBUILDING = {err = 'REBUILDING the store is being rebuilt'}
local OTHERS = {err = 'OTHERS the store is that of another owner'}

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

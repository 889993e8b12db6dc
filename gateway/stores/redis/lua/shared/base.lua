-- Shared by all operations. The loader puts the files of this folder before each operation, in the order of its list.
-- KEYS: the hash tag at the start of every key. Scripts derive their keys from it, because only the script knows which
-- session gets a freed slot, and so which keys it writes. One tag keeps all keys in one slot of a Redis cluster.
-- Times are milliseconds of the store's clock: Redis's TIME minus the jumps that lead.lua detected.

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

-- Without a format, Lua writes large numbers as 1.7e+12.
local function whole(number)
  return string.format('%.0f', number)
end

local function after(seconds)
  return whole(now + math.ceil(tonumber(seconds) * 1000))
end

-- Leading and wholeness ---------------------------------------------------------------------------------------------

-- Refusals of scripts that change nothing. client.py raises the gateway's errors for them.
local NOT_LEADING = {err = 'NOTLEADING another replica leads'}
local REBUILDING = {err = 'REBUILDING the store is being rebuilt'}
local OTHERS = {err = 'OTHERS the store is that of another owner'}

-- Return true if the caller led once and no longer leads: another replica leads, or the data of its lead is lost. Its
-- decisions may use older data: an emptied store has no workers, although they run. The caller's fence is the last
-- argument of every script that calls this. 0: the caller acts independently of the lead.
local function fenced()
  local fence = tonumber(ARGV[#ARGV])
  return fence > 0 and fence ~= tonumber(redis.call('GET', key('fence')) or '0')
end

-- Return the run id of this server. It differs after each restart, and between servers.
local function run()
  return string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
end

-- Return true if the store holds all data: it was marked whole in the current run of this server. The data that a
-- server loads at a restart, or holds at a failover, may be older than the replicas' data. Each script checks this at
-- most once, and only if needed, because INFO takes 10 us.
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

-- Register a running worker and the sessions that it holds. Known entries stay as they are, except for a worker that is
-- known as starting.
-- ARGV: worker id, environment, digest, slots, max_uses, address, state, number of sessions, the fields SESSION of
-- each, the caller's fence
-- Returns the ids of the sessions that the worker holds now.

if fenced() then
  return NOT_LEADING
end

-- Return true if the store's *known* session was not written in this run of the server. The worker's own list may
-- correct such an older state.
local function is_old(known)
  return not is_whole() and known[4] ~= run()
end

local id = ARGV[1]
local state = redis.call('HGET', key('worker', id), 'state')
if not state then
  enlist(ARGV)
elseif state == 'starting' then
  -- An older state: the worker completed its start since.
  redis.call('HSET', key('worker', id), 'slots', ARGV[4], 'address', ARGV[6], 'state', ARGV[7])
end
for _, session in ipairs(read_sessions(9, tonumber(ARGV[8]))) do
  local known = redis.call('HMGET', key('session', session.id), 'lease', 'state', 'worker', 'run')
  if not known[3] then
    if known[1] ~= session.lease then -- nothing is known, or that an earlier one of its id was closed
      take_in(session)
    end
  elseif known[3] == id and known[1] == session.lease then
    if known[2] == 'opening' and is_old(known) then
      take_in(session)
    end
  elseif known[3] == id and is_old(known) then
    publish_ended(session.id, known[1])
    take_in(session)
  end
end
relist(id)
return redis.call('SMEMBERS', key('held', id))

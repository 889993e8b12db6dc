-- End a closing session and transfer its slot to an opening, in one step, so that no waiting opening gets the slot.
-- ARGV: the fields OPENING (idle_s and setup_s in seconds), then the closing session's id and lease, time for which a
-- closed session is kept (s)
-- Returns {'granted', session}, {'exists'}, or {'none'} if the session is unknown, not closing or of another lease, or
-- if its worker takes no more sessions, holds more than it has slots, or is of another environment. Also {'none'} if the
-- opening has another owner, which is at a limit.

local opening = ARGV
local id, lease, kept_s = ARGV[#OPENING + 1], ARGV[#OPENING + 2], ARGV[#OPENING + 3]

local session = redis.call('HMGET', key('session', id), 'lease', 'state', 'reason', 'worker', 'environment', 'owner')
if session[1] ~= lease or session[2] ~= 'closing' or session[5] ~= opening[4] then
  return {'none'}
end
local has = redis.call('HMGET', key('worker', session[4]), 'state', 'rank', 'slots')
if has[1] ~= 'ready' then
  return {'none'}
end
if redis.call('SCARD', key('held', session[4])) > tonumber(has[3]) then
  return {'none'} -- it was limited: the slot goes with its session
end
if session[6] ~= opening[3] and room_of(opening) < 1 then
  return {'none'}
end
if opening[1] ~= id then
  local state = redis.call('HGET', key('session', opening[1]), 'state')
  if (state and state ~= 'closed') or redis.call('EXISTS', key('ticket', opening[1])) == 1 then
    return {'exists'}
  end
end
local owner = forget(id, session[1], session[3], kept_s)
redis.call('SREM', key('held', session[4]), id)
if opening[GROUP] == '' then
  grant(opening, has[2])
else
  grant_member(opening, has[2])
end
if owner and owner ~= opening[3] then
  serve_owners({[owner] = true})
end
if opening[GROUP] ~= '' then
  serve(opening[4]) -- what was reserved for it is free
end
return {'granted', redis.call('HGETALL', key('session', opening[1]))}

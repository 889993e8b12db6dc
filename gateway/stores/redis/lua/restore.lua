-- Register sessions that a replica serves, if the session is unknown and its worker is known.
-- ARGV: the fields SESSION of each session
-- Returns the ids of the given sessions that the store holds now.

local held, workers = {}, {}
for _, session in ipairs(read_sessions(1, #ARGV / #SESSION)) do
  local known = redis.call('HMGET', key('session', session.id), 'lease', 'worker')
  if not known[2] and known[1] ~= session.lease and redis.call('EXISTS', key('worker', session.worker)) == 1 then
    take_in(session)
    workers[session.worker] = true
    known = {session.lease, session.worker}
  end
  if known[1] == session.lease and known[2] == session.worker then
    held[#held + 1] = session.id
  end
end
for worker in pairs(workers) do
  relist(worker)
end
return held

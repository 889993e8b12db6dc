-- Drain a worker: it gets no more sessions. A starting worker never gets a session.
-- ARGV: worker id, '1' to drain it only if it holds no session, the caller's fence
-- Returns 1 if the worker is draining now, else 0.

if fenced() then
  return NOT_LEADING
end
local worker = redis.call('HMGET', key('worker', ARGV[1]), 'state', 'environment', 'rank')
if worker[1] and worker[1] ~= 'draining' then
  if ARGV[2] == '1' and (redis.call('SCARD', key('held', ARGV[1])) > 0 or not is_whole()) then
    return 0 -- while sessions may be lost, no worker is known to be idle
  end
  drain(ARGV[1], worker[2], worker[3])
  return 1
end
return worker[1] == 'draining' and 1 or 0

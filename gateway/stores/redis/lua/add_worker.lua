-- Register a worker. A known worker stays as it is.
-- ARGV: worker id, environment, digest, slots, max_uses, address, state, the caller's fence
-- Returns 1, or 0 if the worker is known.

if fenced() then
  return NOT_LEADING
end

local id, environment = ARGV[1], ARGV[2]
if redis.call('EXISTS', key('worker', id)) == 1 then
  return 0
end
local rank = enlist(ARGV)
if ARGV[7] == 'ready' then
  list_free(id, environment, rank, 0, tonumber(ARGV[4]))
  serve(environment)
end
return 1

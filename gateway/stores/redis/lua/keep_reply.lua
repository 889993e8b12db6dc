-- Keep the reply that ends an episode, for repeats of its request. It replaces an earlier one.
-- ARGV: session id, reply, time for which it is kept (s)
-- Returns 1.

redis.call('SET', key('reply', ARGV[1]), ARGV[2], 'PX', whole(math.ceil(tonumber(ARGV[3]) * 1000)))
return 1

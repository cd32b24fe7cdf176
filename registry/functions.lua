#!lua name=pdmesh_@VERSION@
-- Membership and page ownership of one mesh, as atomic functions (Redis 7 and later, Valkey).
--
-- Keys, all with the hash tag {mesh}, so that they lie in one slot:
--   1 meta    hash    inc (random, new after a loss of data), seq (last event), epoch (last given)
--   2 leases  zset    worker -> end of its lease, ms of Redis' clock
--   3 roster  hash    worker -> "epoch:state"
--   4 events  stream  entry <seq>-0 for every change; capped
--   5 worker  hash    epoch, instance, state, record; expires with the lease
--   6 pages   set     hashes of the pages the worker owns; expires with the lease
--
-- Every change checks the worker's epoch: a stale one changes nothing and is answered FENCED.

local VERSION = '@VERSION@'
local MAX_EVENTS = 20000
local MAX_ARGS = 500 -- below the limit of unpack

local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function now_ms()
  return math.floor(now_us() / 1000)
end

local function text(number)
  return string.format('%.0f', number)
end

-- Names the data set; a data set without a name is new, and its events would be another's.
local function begin(keys, candidate)
  if redis.call('HSETNX', keys[1], 'inc', candidate) == 1 then
    redis.call('HDEL', keys[1], 'seq')
    redis.call('DEL', keys[4])
  end
end

local function emit(keys, ...)
  local seq = text(redis.call('HINCRBY', keys[1], 'seq', 1))
  redis.call('XADD', keys[4], 'MAXLEN', '~', MAX_EVENTS, seq .. '-0', ...)
end

-- Lengthens the life of a shared key; never shortens it.
local function stretch(key, ttl)
  if redis.call('PTTL', key) < tonumber(ttl) then
    redis.call('PEXPIRE', key, ttl)
  end
end

local function touch(keys, id, epoch, state, ttl)
  redis.call('PEXPIRE', keys[5], ttl)
  redis.call('PEXPIRE', keys[6], ttl)
  redis.call('ZADD', keys[2], text(now_ms() + ttl), id)
  redis.call('HSET', keys[3], id, epoch .. ':' .. state)
  stretch(keys[2], ttl)
  stretch(keys[3], ttl)
end

-- nil if the epoch is the worker's, else the answer to give.
local function fenced(keys, epoch)
  local current = redis.call('HGET', keys[5], 'epoch')
  if current == epoch and redis.call('HEXISTS', keys[1], 'inc') == 1 then
    return nil
  end
  return { 'FENCED', current or '0' }
end

-- ARGV: id, instance, record, ttl_ms, state, takeover (1 or 0), candidate for inc.
-- Answers OK epoch, or TAKEN instance if a live process of another instance holds the name.
-- Epochs rise for ever: by one, and to the clock, so also across a loss of data.
local function register(keys, args)
  local id, instance, record, ttl, state = args[1], args[2], args[3], args[4], args[5]
  local holder = redis.call('HGET', keys[5], 'instance')
  if holder and holder ~= instance and args[6] ~= '1' then
    return { 'TAKEN', holder }
  end
  begin(keys, args[7])
  local last = tonumber(redis.call('HGET', keys[1], 'epoch') or '0')
  local epoch = text(math.max(last + 1, now_us()))
  redis.call('HSET', keys[1], 'epoch', epoch)
  redis.call('DEL', keys[5], keys[6])
  redis.call('HSET', keys[5], 'epoch', epoch, 'instance', instance, 'state', state,
    'record', record)
  touch(keys, id, epoch, state, ttl)
  emit(keys, 'op', 'join', 'worker', id, 'epoch', epoch, 'state', state, 'record', record)
  return { 'OK', epoch }
end

-- ARGV: id, epoch, ttl_ms.
local function renew(keys, args)
  local refused = fenced(keys, args[2])
  if refused then return refused end
  touch(keys, args[1], args[2], redis.call('HGET', keys[5], 'state'), args[3])
  return { 'OK' }
end

-- ARGV: id, epoch, ttl_ms, state.
local function set_state(keys, args)
  local refused = fenced(keys, args[2])
  if refused then return refused end
  local before = redis.call('HGET', keys[5], 'state')
  redis.call('HSET', keys[5], 'state', args[4])
  touch(keys, args[1], args[2], args[4], args[3])
  if before ~= args[4] then
    emit(keys, 'op', 'state', 'worker', args[1], 'epoch', args[2], 'state', args[4])
  end
  return { 'OK' }
end

local function change_pages(command, op)
  -- ARGV: id, epoch, hash...
  return function(keys, args)
    local refused = fenced(keys, args[2])
    if refused then return refused end
    for first = 3, #args, MAX_ARGS do
      local last = math.min(first + MAX_ARGS - 1, #args)
      redis.call(command, keys[6], unpack(args, first, last))
    end
    redis.call('PEXPIRE', keys[6], math.max(1, redis.call('PTTL', keys[5])))
    emit(keys, 'op', op, 'worker', args[1], 'epoch', args[2],
      'count', #args - 2, 'hashes', table.concat(args, '', 3, #args))
    return { 'OK' }
  end
end

local function leave(keys, id, epoch)
  redis.call('ZREM', keys[2], id)
  redis.call('HDEL', keys[3], id)
  emit(keys, 'op', 'leave', 'worker', id, 'epoch', epoch)
end

-- ARGV: id, epoch.
local function deregister(keys, args)
  local refused = fenced(keys, args[2])
  if refused then return refused end
  redis.call('DEL', keys[5], keys[6])
  leave(keys, args[1], args[2])
  return { 'OK' }
end

-- ARGV: candidate for inc. Drops ended leases; answers inc, seq, epoch, {worker, "epoch:state"...}.
local function members(keys, args)
  begin(keys, args[1])
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', keys[2], '-inf', text(now_ms()))) do
    local entry = redis.call('HGET', keys[3], id)
    leave(keys, id, entry and string.match(entry, '^%d+') or '0')
  end
  local meta = redis.call('HMGET', keys[1], 'inc', 'seq', 'epoch')
  return { meta[1], meta[2] or '0', meta[3] or '0', redis.call('HGETALL', keys[3]) }
end

local function export(name, callback, flags)
  redis.register_function({ function_name = 'pdmesh_' .. name .. '_' .. VERSION,
    callback = callback, flags = flags })
end

-- A full store refuses new pages (they are hints) but never membership.
export('register', register, { 'allow-oom' })
export('renew', renew, { 'allow-oom' })
export('set_state', set_state, { 'allow-oom' })
export('publish', change_pages('SADD', 'publish'), {})
export('evict', change_pages('SREM', 'evict'), { 'allow-oom' })
export('deregister', deregister, { 'allow-oom' })
export('members', members, { 'allow-oom' })

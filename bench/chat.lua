-- wrk script: posts one chat completion again and again.
-- Arguments after --: stream(0|1) max_tokens model [key]. Prints one RESULT line for bench/load.py.
function init(args)
  local stream, tokens, model, key = args[1] or "0", args[2] or "16", args[3] or "mock", args[4]
  wrk.method = "POST"
  wrk.headers["content-type"] = "application/json"
  if key then wrk.headers["authorization"] = "Bearer " .. key end
  wrk.body = string.format(
    '{"model":"%s","messages":[{"role":"user","content":"Say something short about rivers."}],"max_tokens":%s,"stream":%s}',
    model, tokens, stream == "1" and "true" or "false")
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format('RESULT {"requests":%d,"seconds":%.6f,"p50_ms":%.4f,"p99_ms":%.4f,"errors":%d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1000, latency:percentile(99) / 1000,
    errors.status + errors.connect + errors.read + errors.timeout))
end

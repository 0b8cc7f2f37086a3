// The stream of snapshots. It is read by fetch and not by EventSource, which can't send the admin key in a header.

/** The gateway said no: `status` and its words. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function refused(answer) {
  try {
    return new Refused(answer.status, (await answer.json()).error.message);
  } catch {
    return new Refused(answer.status, `the gateway answered ${answer.status}`);
  }
}

/** One snapshot after the other, until the gateway ends the stream. Throws Refused, or what fetch throws. */
export async function* snapshots(key, signal) {
  const answer = await fetch("console/feed", {
    headers: { authorization: `Bearer ${key}` }, signal, cache: "no-store", credentials: "omit", redirect: "error",
  });
  if (!answer.ok) throw await refused(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) yield JSON.parse(event.slice(6));
  }
}

// A streamed reply of the API: its server-sent events as objects.

/** Yields each chunk up to [DONE]. Raises an Error with the server's message if the call fails. */
export async function* chunks(url, body, signal, requestId) {
  const response = await fetch(url, {
    method: "POST",
    headers: { "content-type": "application/json", "x-request-id": requestId },
    body: JSON.stringify(body),
    signal,
  });
  if (response.status === 401) window.location.reload();  // the login form is there now
  if (!response.ok) {
    const answer = await response.json().catch(() => null);
    throw new Error(answer?.error?.message ?? `The server answered with status ${response.status}.`);
  }
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message ?? "The request failed.");
    yield chunk;
  }
  throw new Error("The answer ended early: the connection was closed.");
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

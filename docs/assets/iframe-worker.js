// Search without a server: browsers start no worker from a file, so there its script runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.loaded = new Promise((resolve) => {
        const start = () => {
          document.body.append(frame);
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          inside.importScripts = (...scripts) =>
            scripts.reduce((before, script) => before.then(() => add(inside, script)), Promise.resolve());
          add(inside, url).then(() => resolve(inside));
        };
        document.body ? start() : addEventListener("DOMContentLoaded", start);
      });
    }

    postMessage(data) {
      this.loaded.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {}
  };
  window.IFrameWorker = window.Worker; // by this name the theme's script sees that it is in a frame

  const add = (inside, url) =>
    new Promise((resolve, reject) => {
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = reject;
      inside.document.head.append(script);
    });
}

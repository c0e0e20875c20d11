(() => {
'use strict';
// A button that copies each pre of the class copy. Without scripts there is none,
// and the text can be selected.
document.querySelectorAll('pre.copy').forEach(pre => {
  const button = document.createElement('button');
  button.type = 'button';
  button.className = 'copy-button';
  button.textContent = 'Copy';
  button.addEventListener('click', async () => {
    const range = document.createRange();
    range.selectNodeContents(pre);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    try {
      await navigator.clipboard.writeText(pre.textContent);
    } catch {
      document.execCommand('copy');
    }
    button.textContent = 'Copied';
    setTimeout(() => { button.textContent = 'Copy'; }, 2000);
  });
  pre.before(button);
});
})();
